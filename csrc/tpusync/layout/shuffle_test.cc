#include "tpusync/layout/shuffle.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace tpusync::layout {
namespace {

using Kernel = void (*ShuffleKernels::*)(const Shuffle&);

struct Case {
  const char* name;
  Kernel kernel;
  std::size_t element;  // bytes
  bool src_rows;        // the source has 4 / element rows
  bool dst_rows;
  std::size_t src_lane, dst_lane;  // bytes per lane in a row of each side
};

const Case kCases[] = {
    {"split_2x16", &ShuffleKernels::split_2x16, 2, false, true, 4, 2},
    {"join_2x16", &ShuffleKernels::join_2x16, 2, true, false, 2, 4},
    {"pick_2x16", &ShuffleKernels::pick_2x16, 2, false, false, 4, 2},
    {"repack_2x16", &ShuffleKernels::repack_2x16, 2, true, false, 4, 4},
    {"split_4x8", &ShuffleKernels::split_4x8, 1, false, true, 4, 1},
    {"join_4x8", &ShuffleKernels::join_4x8, 1, true, false, 1, 4},
    {"pick_4x8", &ShuffleKernels::pick_4x8, 1, false, false, 4, 1},
    {"repack_4x8", &ShuffleKernels::repack_4x8, 1, true, false, 4, 4},
};

// Where byte `byte` of element `row` of word `lane` lies in a side.
std::size_t place(bool rows, std::size_t lane_bytes, std::size_t row_stride, std::size_t element,
                  std::size_t lane, std::size_t row, std::size_t byte) {
  return (rows ? row * row_stride : row * element) + lane * lane_bytes + byte;
}

// `aligned` places the destination such that it may be streamed to.
void check(const ShuffleKernels& kernels, const Case& c, std::size_t lanes, bool aligned) {
  SCOPED_TRACE(std::string(kernels.name) + " " + c.name + " " + std::to_string(lanes));
  const std::size_t blocks = 3, row_stride = aligned ? 1024 : 1031, block_stride = aligned ? 4096 : 4127;
  std::mt19937 random(lanes);
  std::vector<std::byte> src(3 * block_stride), memory(3 * block_stride + 64), expected;
  for (auto& byte : src) byte = std::byte(random());
  for (auto& byte : memory) byte = std::byte(random());
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(memory.data()) % 64 + (aligned ? 0 : 3);
  const bool packed_both = !c.src_rows && !c.dst_rows;
  const std::size_t rows = packed_both ? 1 : 4 / c.element;
  expected = memory;
  for (std::size_t block = 0; block < blocks; ++block) {
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      for (std::size_t row = 0; row < rows; ++row) {
        for (std::size_t byte = 0; byte < c.element; ++byte) {
          expected[head + block * block_stride +
                   place(c.dst_rows, c.dst_lane, row_stride, c.element, lane, row, byte)] =
              src[block * block_stride +
                  place(c.src_rows, c.src_lane, row_stride, c.element, lane, row, byte)];
        }
      }
    }
  }
  (kernels.*c.kernel)({.dst = memory.data() + head,
                       .src = src.data(),
                       .lanes = lanes,
                       .row_stride = row_stride,
                       .blocks = blocks,
                       .src_block_stride = block_stride,
                       .dst_block_stride = block_stride,
                       .stores = aligned ? Stores::kStreaming : Stores::kCached});
  streaming_fence();
  EXPECT_EQ(memory, expected);
}

TEST(Shuffle, EveryImplementationMovesTheSameBytesAndNoOthers) {
  for (const ShuffleKernels* kernels : shuffle_kernels()) {
    for (const Case& c : kCases) {
      for (const std::size_t lanes : {0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 200}) {
        check(*kernels, c, lanes, false);
        check(*kernels, c, lanes, true);
      }
    }
  }
}

// `gap` bytes between rows, groups and lanes; multiples of 64 allow streaming.
void check_transpose(const ShuffleKernels& kernels, std::size_t lanes, std::size_t rows, std::size_t group,
                     std::size_t gap) {
  Shuffle s{
      .lanes = lanes, .row_stride = lanes * 4 + gap, .blocks = 2, .rows = rows, .rows_per_group = group};
  s.group_stride = group * s.row_stride + gap;
  s.lane_stride = (rows * 4 + 63) / 64 * 64 + gap;
  s.src_block_stride = (rows / group + 1) * s.group_stride;
  s.dst_block_stride = lanes * s.lane_stride;
  s.stores = gap % 64 == 0 ? Stores::kStreaming : Stores::kCached;
  std::mt19937 random(lanes + rows);
  std::vector<std::byte> src(2 * s.src_block_stride), memory(2 * s.dst_block_stride + 64, std::byte{9});
  for (auto& byte : src) byte = std::byte(random());
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(memory.data()) % 64;
  auto expected = memory;
  for (std::size_t i = 0; i < 2 * rows * lanes * 4; ++i) {
    const std::size_t byte = i % 4, lane = i / 4 % lanes, row = i / 4 / lanes % rows,
                      block = i / 4 / lanes / rows;
    expected[head + block * s.dst_block_stride + lane * s.lane_stride + row * 4 + byte] =
        src[block * s.src_block_stride + row / group * s.group_stride + row % group * s.row_stride +
            lane * 4 + byte];
  }
  s.dst = memory.data() + head;
  s.src = src.data();
  kernels.transpose_32(s);
  streaming_fence();
  EXPECT_EQ(memory, expected) << kernels.name << " " << lanes << " " << rows << " " << group << " " << gap;
}

TEST(Shuffle, EveryImplementationTransposesWords) {
  for (const ShuffleKernels* kernels : shuffle_kernels()) {
    for (const std::size_t lanes : {1, 7, 8, 17, 128}) {
      for (const std::size_t rows : {1, 4, 15, 16, 33, 64, 300}) {
        for (const std::size_t group : {1, 3, 4, 1000}) {
          for (const std::size_t gap : {0, 64, 3}) check_transpose(*kernels, lanes, rows, group, gap);
        }
      }
    }
  }
}

// A row ends with its last element, not with its last word: nothing behind it may be read.
TEST(Shuffle, PickAndRepackReadNoByteBehindTheLastElement) {
  for (const ShuffleKernels* kernels : shuffle_kernels()) {
    for (const std::size_t lanes : {1, 16, 17, 32, 64, 128}) {
      std::vector<std::byte> src(lanes * 4 - 2, std::byte{5}), dst(lanes * 4);
      kernels->pick_2x16({.dst = dst.data(), .src = src.data(), .lanes = lanes});
      kernels->repack_2x16(
          {.dst = dst.data(), .src = src.data(), .lanes = lanes, .row_stride = 0, .blocks = 1});
      src.resize(lanes * 4 - 3);
      kernels->pick_4x8({.dst = dst.data(), .src = src.data(), .lanes = lanes});
      kernels->repack_4x8(
          {.dst = dst.data(), .src = src.data(), .lanes = lanes, .row_stride = 0, .blocks = 1});
      EXPECT_EQ(dst, std::vector<std::byte>(lanes * 4, std::byte{5}));
    }
  }
}

}  // namespace
}  // namespace tpusync::layout
