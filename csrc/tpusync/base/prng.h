// A small seeded generator (splitmix64) for tests, fakes and jitter. Never for secrets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "tpusync/base/bytes.h"

namespace tpusync::base {

// Thread-compatible.
class Prng {
 public:
  explicit Prng(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }

  // 0 to bound - 1; bound is at least 1. The bias is below bound / 2**64.
  std::uint64_t below(std::uint64_t bound) { return next() % bound; }

  // True once in `n` calls on average.
  bool one_in(std::uint64_t n) { return below(n) == 0; }

  void fill(std::span<std::byte> bytes) {
    while (bytes.size() >= 8) {
      store_le(bytes.data(), next());
      bytes = bytes.subspan(8);
    }
    const std::uint64_t last = next();
    if (!bytes.empty()) std::memcpy(bytes.data(), &last, bytes.size());
  }

 private:
  std::uint64_t state_;
};

}  // namespace tpusync::base
