// Little-endian integers in byte buffers, and byte units.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tpusync::base {

static_assert(std::endian::native == std::endian::little, "formats are little-endian and encoded by memcpy");

inline constexpr std::uint64_t kKiB = 1024;
inline constexpr std::uint64_t kMiB = 1024 * kKiB;
inline constexpr std::uint64_t kGiB = 1024 * kMiB;

template <typename Integer>
Integer load_le(const std::byte* from) {
  Integer value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename Integer>
void store_le(std::byte* to, Integer value) {
  std::memcpy(to, &value, sizeof value);
}

// `align` is a power of two.
constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t align) {
  return (value + align - 1) & ~(align - 1);
}

constexpr bool is_aligned(std::uint64_t value, std::uint64_t align) {
  return (value & (align - 1)) == 0;
}

}  // namespace tpusync::base
