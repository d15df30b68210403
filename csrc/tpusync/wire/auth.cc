#include "tpusync/wire/auth.h"

#include <sodium.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace tpusync::wire {

static_assert(kProofBytes == crypto_auth_hmacsha256_BYTES);
static_assert(kTagBytes == crypto_shorthash_siphashx24_BYTES);
static_assert(sizeof(FrameKey) == crypto_shorthash_siphashx24_KEYBYTES);

namespace {

constexpr std::string_view kInitiatorLabel = "tpusync wire v1 proof of the initiator";
constexpr std::string_view kAcceptorLabel = "tpusync wire v1 proof of the acceptor";
constexpr std::string_view kKeysLabel = "tpusync wire v1 keys of the stream";

// sodium_init is idempotent and thread-safe; it fails only where the system has no source of randomness, and
// there nothing of this room may run.
void ready() {
  static const bool ok = sodium_init() >= 0;
  if (!ok) std::abort();
}

// Never null, as libsodium wants it also where there is nothing (an empty secret).
const unsigned char* raw(std::span<const std::byte> bytes) {
  static constexpr unsigned char kNothing = 0;
  return bytes.empty() ? &kNothing : reinterpret_cast<const unsigned char*>(bytes.data());
}

Proof hmac(std::span<const std::byte> secret, std::string_view label, const Transcript& transcript) {
  ready();
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, raw(secret), secret.size());
  crypto_auth_hmacsha256_update(&state, raw(std::as_bytes(std::span(label))), label.size());
  crypto_auth_hmacsha256_update(&state, raw(transcript), transcript.size());
  Proof out;
  crypto_auth_hmacsha256_final(&state, reinterpret_cast<unsigned char*>(out.data()));
  sodium_memzero(&state, sizeof state);
  return out;
}

}  // namespace

Proof make_proof(std::span<const std::byte> secret, Role prover, const Transcript& transcript) {
  return hmac(secret, prover == Role::kInitiator ? kInitiatorLabel : kAcceptorLabel, transcript);
}

bool check_proof(std::span<const std::byte> secret, Role prover, const Transcript& transcript,
                 const Proof& proof) {
  const Proof expected = make_proof(secret, prover, transcript);
  return sodium_memcmp(expected.data(), proof.data(), proof.size()) == 0;
}

StreamKeys derive_keys(std::span<const std::byte> secret, const Transcript& transcript) {
  const Proof both = hmac(secret, kKeysLabel, transcript);
  StreamKeys keys;
  std::copy_n(both.begin(), keys.from_initiator.size(), keys.from_initiator.begin());
  std::copy_n(both.begin() + keys.from_initiator.size(), keys.from_acceptor.size(),
              keys.from_acceptor.begin());
  return keys;
}

Tag make_tag(const FrameKey& key, std::span<const std::byte> head_and_table) {
  Tag tag;
  crypto_shorthash_siphashx24(reinterpret_cast<unsigned char*>(tag.data()), raw(head_and_table),
                              head_and_table.size(), raw(key));
  return tag;
}

bool check_tag(const FrameKey& key, std::span<const std::byte> head_and_table,
               std::span<const std::byte> tag) {
  const Tag expected = make_tag(key, head_and_table);
  return tag.size() == expected.size() && sodium_memcmp(expected.data(), tag.data(), tag.size()) == 0;
}

void fill_random(std::span<std::byte> out) {
  ready();
  randombytes_buf(out.data(), out.size());
}

std::uint64_t random_number() {
  std::uint64_t number = 0;
  while (number == 0) fill_random(std::as_writable_bytes(std::span(&number, 1)));
  return number;
}

}  // namespace tpusync::wire
