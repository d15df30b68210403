// The inner loops of a change of layout: elements that are packed into words on one side and lie in rows on
// the other. TPUs pack 2 rows of 16-bit and 4 rows of 8-bit elements into 32-bit words, lane by lane:
//
//   packed   a0 b0 a1 b1 a2 b2 ...      split: packed -> rows      join: rows -> packed
//   rows     a0 a1 a2 ...  |  b0 b1 b2 ...
//
// transpose moves 32-bit words whose lanes are minor on one side and whose rows are minor on the other:
// dst[lane][row] = src[row][lane]. pick takes one row out of packed words, repack makes words out of one row
// of each of several packed rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "tpusync/layout/copy_run.h"

namespace tpusync::layout {

// A value: `blocks` times the same shuffle of `lanes` words, at block strides in bytes.
struct Shuffle {
  std::byte* dst = nullptr;
  const std::byte* src = nullptr;
  std::size_t lanes = 0;
  std::size_t row_stride =
      0;  // between the rows of the side that is not packed (split: dst, join and repack: src)
  std::size_t blocks = 1;
  std::size_t src_block_stride = 0;
  std::size_t dst_block_stride = 0;
  Stores stores = Stores::kCached;  // kStreaming only where every row of dst is aligned to 64 bytes
  // Transpose only: rows [first_row, rows) of src, in groups that are row_stride apart inside and
  // group_stride from one to the next, and how far the lanes of dst are apart.
  std::size_t rows = 0;
  std::size_t first_row = 0;
  std::size_t rows_per_group = 1;
  std::size_t group_stride = 0;
  std::size_t lane_stride = 0;

  std::size_t row_offset(std::size_t row) const {
    return row / rows_per_group * group_stride + row % rows_per_group * row_stride;
  }
};

// One implementation of them all. What it does is the same in each; how fast, is not.
struct ShuffleKernels {
  std::string_view name;
  void (*split_2x16)(const Shuffle&);
  void (*join_2x16)(const Shuffle&);
  void (*pick_2x16)(const Shuffle&);  // src points at the element of the first word
  void (*repack_2x16)(const Shuffle&);
  void (*split_4x8)(const Shuffle&);
  void (*join_4x8)(const Shuffle&);
  void (*pick_4x8)(const Shuffle&);
  void (*repack_4x8)(const Shuffle&);
  void (*transpose_32)(const Shuffle&);
};

// Every implementation that this processor runs, the best last.
std::span<const ShuffleKernels* const> shuffle_kernels();

// The best one.
const ShuffleKernels& best_shuffle_kernels();

const ShuffleKernels& portable_kernels();
#if defined(__x86_64__)
const ShuffleKernels& avx2_kernels();
const ShuffleKernels& avx512_kernels();  // needs AVX-512 BW and VBMI
#endif

}  // namespace tpusync::layout
