// Proofs and keys out of a shared secret: HMAC-SHA-256 for the handshake, SipHash-2-4-128 for the frames of a
// stream that it opened. Pure, but for random bytes. Built on libsodium, which appears in auth.cc only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tpusync/wire/frame.h"
#include "tpusync/wire/handshake.h"

namespace tpusync::wire {

constexpr std::size_t kSecretBytesMin = 16;
constexpr std::size_t kSecretBytesMax = 4096;

enum class Role : std::uint8_t { kInitiator, kAcceptor };

using FrameKey = std::array<std::byte, 16>;
using Tag = std::array<std::byte, kTagBytes>;

struct StreamKeys {
  FrameKey from_initiator{};
  FrameKey from_acceptor{};
};

// The encoded Hello followed by the encoded Challenge: what both proofs and both keys depend on.
using Transcript = std::vector<std::byte>;

// An empty secret is that of an endpoint without authentication; the messages are the same.
Proof make_proof(std::span<const std::byte> secret, Role prover, const Transcript& transcript);
bool check_proof(std::span<const std::byte> secret, Role prover, const Transcript& transcript,
                 const Proof& proof);
StreamKeys derive_keys(std::span<const std::byte> secret, const Transcript& transcript);

// The tag of a frame, over head and table as they go over the wire.
Tag make_tag(const FrameKey& key, std::span<const std::byte> head_and_table);
bool check_tag(const FrameKey& key, std::span<const std::byte> head_and_table,
               std::span<const std::byte> tag);

void fill_random(std::span<std::byte> out);
std::uint64_t random_number();  // never 0

}  // namespace tpusync::wire
