// How two strangers become a stream. Four messages, each of a fixed length but the last:
//
//   initiator                                   acceptor
//     Hello      nonce, who, which stream  ----->
//                                         <-----  Challenge  nonce, who
//     Proof      HMAC(secret, initiator)   ----->              refused here: closed without a word
//                                         <-----  Ready      HMAC(secret, acceptor)
//
// Both proofs cover the whole of Hello and Challenge, so each is good for this connection only: a replayed
// one meets another nonce, a reflected one carries the wrong label. The initiator proves first, so that a
// stranger who connects learns nothing that depends on the secret.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "tpusync/base/error.h"
#include "tpusync/wire/writer.h"

namespace tpusync::wire {

constexpr std::uint32_t kHandshakeMagic = 0x48535054;  // "TPSH"
constexpr std::uint16_t kVersion = 1;
constexpr std::size_t kHelloBytes = 72;
constexpr std::size_t kChallengeBytes = 56;
constexpr std::size_t kProofBytes = 32;
constexpr std::uint16_t kStreamsMax = 64;

using Nonce = std::array<std::byte, 32>;
using Proof = std::array<std::byte, kProofBytes>;

// Names one opened endpoint, for ever: drawn at random when it opens. A value.
using EndpointId = std::array<std::byte, 16>;

struct Hello {
  std::uint16_t version = kVersion;
  std::uint16_t stream = 0;       // which of
  std::uint16_t num_streams = 1;  // this many
  std::uint64_t generation =
      0;  // of the session, drawn by the initiator; streams with the same one belong together
  EndpointId initiator{};
  Nonce nonce{};
  bool operator==(const Hello&) const = default;
};

struct Challenge {
  std::uint16_t version = kVersion;
  EndpointId acceptor{};
  Nonce nonce{};
  bool operator==(const Challenge&) const = default;
};

void encode_hello(const Hello& hello, Writer& out);
void encode_challenge(const Challenge& challenge, Writer& out);

// kUnsupported for another version, with both named; kCorrupt for anything else that is wrong.
base::Result<Hello> decode_hello(std::span<const std::byte> in);
base::Result<Challenge> decode_challenge(std::span<const std::byte> in);

}  // namespace tpusync::wire
