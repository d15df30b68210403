// What is remembered of pages that are not stored: how often and when they were used. Bounded.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace tpusync::index {

// A value. How often a page was used, and when that was the last time.
struct Ghost {
  std::uint32_t last_use = 0;
  std::uint32_t num_uses : 8 = 0;  // 0: there is no ghost
  std::uint32_t tag : 24 = 0;
};
static_assert(sizeof(Ghost) == 8);

// Thread-compatible. Pages are told apart by their set and 24 bits of their key: a rare mix-up costs order of
// eviction only.
class GhostTable {
 public:
  // At least so many places; never fewer than before. Growing forgets: a store grows before it evicts.
  void reserve(std::size_t num_places) {
    num_places = std::bit_ceil(std::max(num_places, kWays));
    if (num_places > places_.size()) places_.assign(num_places, Ghost());
  }
  std::span<const Ghost> places() const { return places_; }

  // What is remembered of the page.
  Ghost find(std::uint64_t key_hash) const {
    const std::uint64_t mixed = mix(key_hash);
    for (const Ghost& ghost : places().subspan(set_of(mixed), kWays)) {
      if (ghost.num_uses > 0 && ghost.tag == tag_of(mixed)) return ghost;
    }
    return {};
  }
  // The same, and it is remembered no more.
  Ghost take(std::uint64_t key_hash) {
    const std::uint64_t mixed = mix(key_hash);
    for (Ghost& ghost : std::span(places_).subspan(set_of(mixed), kWays)) {
      if (ghost.num_uses > 0 && ghost.tag == tag_of(mixed)) return std::exchange(ghost, Ghost());
    }
    return {};
  }

  // Remembers, instead of the ghost of the same page or else the one of its set that was used longest before
  // `now`.
  void put(std::uint64_t key_hash, std::uint32_t last_use, std::uint8_t num_uses, std::uint32_t now) {
    const std::uint64_t mixed = mix(key_hash);
    const auto age = [&](const Ghost& ghost) {
      if (ghost.num_uses == 0) return std::uint64_t{1} << 32;
      return ghost.tag == tag_of(mixed) ? std::uint64_t{1} << 33 : std::uint64_t{now - ghost.last_use};
    };
    const auto set = std::span(places_).subspan(set_of(mixed), kWays);
    *std::max_element(set.begin(), set.end(), [&](const Ghost& a, const Ghost& b) {
      return age(a) < age(b);
    }) = {.last_use = last_use, .num_uses = num_uses, .tag = tag_of(mixed)};
  }

 private:
  static constexpr std::size_t kWays = 4;

  static std::uint64_t mix(std::uint64_t key_hash) { return key_hash * 0x9e3779b97f4a7c15ull; }
  static std::uint32_t tag_of(std::uint64_t mixed) { return static_cast<std::uint32_t>(mixed >> 40); }
  std::size_t set_of(std::uint64_t mixed) const { return (mixed >> 8) % (places_.size() / kWays) * kWays; }

  std::vector<Ghost> places_;
};

}  // namespace tpusync::index
