// The shuffles in plain C++. They define what the others do.
#include <algorithm>
#include <bit>
#include <cstring>

#include "tpusync/layout/shuffle.h"

namespace tpusync::layout {

namespace {

static_assert(std::endian::native == std::endian::little, "words are taken apart in little-endian order");

template <typename T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <typename T>
void store(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

// Calls `body(dst, src)` for each block.
template <typename Body>
void for_blocks(const Shuffle& s, Body&& body) {
  for (std::size_t i = 0; i < s.blocks; ++i)
    body(s.dst + i * s.dst_block_stride, s.src + i * s.src_block_stride);
}

template <typename T, std::size_t kPack>
void split(const Shuffle& s) {
  for_blocks(s, [&](std::byte* dst, const std::byte* src) {
    for (std::size_t lane = 0; lane < s.lanes; ++lane) {
      const auto word = load<std::uint32_t>(src + lane * 4);
      for (std::size_t row = 0; row < kPack; ++row) {
        store(dst + row * s.row_stride + lane * sizeof(T), static_cast<T>(word >> (row * sizeof(T) * 8)));
      }
    }
  });
}

template <typename T, std::size_t kPack>
void join(const Shuffle& s) {
  for_blocks(s, [&](std::byte* dst, const std::byte* src) {
    for (std::size_t lane = 0; lane < s.lanes; ++lane) {
      std::uint32_t word = 0;
      for (std::size_t row = 0; row < kPack; ++row) {
        word |= std::uint32_t{load<T>(src + row * s.row_stride + lane * sizeof(T))} << (row * sizeof(T) * 8);
      }
      store(dst + lane * 4, word);
    }
  });
}

template <typename T>
void pick(const Shuffle& s) {
  for_blocks(s, [&](std::byte* dst, const std::byte* src) {
    for (std::size_t lane = 0; lane < s.lanes; ++lane) store(dst + lane * sizeof(T), load<T>(src + lane * 4));
  });
}

template <typename T, std::size_t kPack>
void repack(const Shuffle& s) {
  for_blocks(s, [&](std::byte* dst, const std::byte* src) {
    for (std::size_t lane = 0; lane < s.lanes; ++lane) {
      std::uint32_t word = 0;
      for (std::size_t row = 0; row < kPack; ++row) {
        word |= std::uint32_t{load<T>(src + row * s.row_stride + lane * 4)} << (row * sizeof(T) * 8);
      }
      store(dst + lane * 4, word);
    }
  });
}

// Blocks of 16 by 16, so that the lines of both sides are used up while they are at hand.
void transpose(const Shuffle& s) {
  constexpr std::size_t kBlock = 16;
  for_blocks(s, [&](std::byte* dst, const std::byte* src) {
    for (std::size_t lane0 = 0; lane0 < s.lanes; lane0 += kBlock) {
      const std::size_t lane_end = std::min(s.lanes, lane0 + kBlock);
      for (std::size_t row0 = s.first_row; row0 < s.rows; row0 += kBlock) {
        const std::size_t row_end = std::min(s.rows, row0 + kBlock);
        std::size_t from[kBlock];
        for (std::size_t row = row0; row < row_end; ++row) from[row - row0] = s.row_offset(row);
        for (std::size_t lane = lane0; lane < lane_end; ++lane) {
          for (std::size_t row = row0; row < row_end; ++row) {
            store(dst + lane * s.lane_stride + row * 4,
                  load<std::uint32_t>(src + from[row - row0] + lane * 4));
          }
        }
      }
    }
  });
}

constexpr ShuffleKernels kPortable{
    .name = "portable",
    .split_2x16 = &split<std::uint16_t, 2>,
    .join_2x16 = &join<std::uint16_t, 2>,
    .pick_2x16 = &pick<std::uint16_t>,
    .repack_2x16 = &repack<std::uint16_t, 2>,
    .split_4x8 = &split<std::uint8_t, 4>,
    .join_4x8 = &join<std::uint8_t, 4>,
    .pick_4x8 = &pick<std::uint8_t>,
    .repack_4x8 = &repack<std::uint8_t, 4>,
    .transpose_32 = &transpose,
};

}  // namespace

const ShuffleKernels& portable_kernels() {
  return kPortable;
}

}  // namespace tpusync::layout
