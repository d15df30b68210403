// Moves the bytes of nests with the fastest inner loop that fits their shape.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "tpusync/layout/copy_nest.h"
#include "tpusync/layout/shuffle.h"

namespace tpusync::layout {

// The inner loop that a nest gets.
enum class NestKernel : unsigned char { kRuns, kSplit, kJoin, kPick, kRepack, kTranspose, kElements, kBits };
std::string_view kernel_name(NestKernel kernel);
NestKernel kernel_of(const CopyNest& nest);

// A canonical nest is moved from `src` to `dst`, which must hold src_end() and dst_end() and must not
// overlap. A nest that is not in bytes writes parts of bytes: two of those with bytes in common must not be
// applied at once.
void apply_nest(std::byte* dst, const std::byte* src, const CopyNest& nest, const ShuffleKernels& kernels,
                Stores stores);

// Piece `piece` of `num_pieces` of a nest: together they are the nest. Pieces of a nest that is not in bytes
// are empty but for the first.
CopyNest piece_of(const CopyNest& nest, std::uint64_t piece, std::uint64_t num_pieces);

}  // namespace tpusync::layout
