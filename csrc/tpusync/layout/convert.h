// Changes the layout of arrays and of boxes inside them. Pure: the caller owns the memory and the threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/base/parallel.h"
#include "tpusync/layout/copy_nest.h"
#include "tpusync/layout/shuffle.h"
#include "tpusync/layout/tiled_layout.h"

namespace tpusync::layout {

// A rectangle of indices. A value.
struct Box {
  Dims origin;
  Dims extent;
  friend bool operator==(const Box&, const Box&) = default;
};

// kInvalid unless the box has the layout's rank and lies inside its dimensions.
base::Status check_box(const TiledLayout& layout, const Box& box);

// The nests that move box `from` of an array in layout `src` to the box at `to` of one in layout `dst`.
// kInvalid for boxes outside the arrays or elements of different sizes.
base::Result<std::vector<CopyNest>> plan_box(const TiledLayout& dst, std::span<const std::int64_t> to,
                                             const TiledLayout& src, const Box& from);

// Moves nests, in pieces shared out to the caller's threads.
void apply_nests(std::byte* dst, const std::byte* src, std::span<const CopyNest> nests,
                 base::ParallelFor& loop, const ShuffleKernels& kernels = best_shuffle_kernels());

// Whole arrays. `codes` holds the elements row-major, each in the dtype's storage bits, unused upper bits
// zero; `tiled` holds layout.padded_bytes(). kInvalid for buffers of another size or that overlap.
base::Status tile(const TiledLayout& layout, std::span<std::byte> tiled, std::span<const std::byte> codes,
                  std::uint64_t fill, base::ParallelFor& loop,
                  const ShuffleKernels& kernels = best_shuffle_kernels());
base::Status untile(const TiledLayout& layout, std::span<std::byte> codes, std::span<const std::byte> tiled,
                    base::ParallelFor& loop, const ShuffleKernels& kernels = best_shuffle_kernels());

// The bits of a tiled buffer that hold elements are ones in `mask`, padding is zeros. `mask` as `tiled`
// above.
base::Status live_mask(const TiledLayout& layout, std::span<std::byte> mask);

}  // namespace tpusync::layout
