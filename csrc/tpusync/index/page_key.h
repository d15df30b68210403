// The key of a page: a SHA-256 over the page's tokens and the key of the page before it.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>

#include "tpusync/base/bytes.h"

namespace tpusync::index {

inline constexpr std::size_t kKeyBytes = 32;

// A value. Keys are uniformly distributed, so any of their bits serve as a hash.
struct PageKey {
  std::array<std::byte, kKeyBytes> bytes{};

  auto operator<=>(const PageKey&) const = default;

  // The first 48 bits: enough to find a parent by, since a wrong guess only costs order of eviction.
  std::uint64_t short_hash() const { return base::load_le<std::uint64_t>(bytes.data()) & kShortHashMask; }
  static constexpr std::uint64_t kShortHashMask = (std::uint64_t{1} << 48) - 1;
};
static_assert(sizeof(PageKey) == kKeyBytes && alignof(PageKey) == 1);

// The place of a page in a region. A number, but not any number.
enum class SlotId : std::uint32_t {};
inline constexpr SlotId kNoSlot{0xffffffffu};
constexpr std::uint32_t to_number(SlotId slot) {
  return static_cast<std::uint32_t>(slot);
}

}  // namespace tpusync::index
