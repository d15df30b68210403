// The plan of a copy of token rows from one pool to another, in tiles or not: pure, made before any byte
// moves.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/layout/copy_nest.h"
#include "tpusync/layout/copy_run.h"
#include "tpusync/layout/page_geometry.h"

namespace tpusync::layout {

struct LayerRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;  // one past the last
};

// A value. Every layer and part of a copy has the same runs, moved by a stride per layer, so they are kept
// once.
struct PageCopyPlan {
  std::vector<CopyRun> runs;    // of one part in layer 0
  std::vector<CopyNest> nests;  // instead of runs where one of the pools is in tiles
  std::uint64_t first_layer = 0;
  std::uint64_t num_layers = 0;
  std::uint64_t src_layer_stride = 0;  // 0: a layer has a buffer of its own
  std::uint64_t dst_layer_stride = 0;
  std::uint64_t src_buffers_per_part = 1;
  std::uint64_t dst_buffers_per_part = 1;
  std::uint64_t size_bytes_per_part = 0;

  // Runs or nests: the copy can be cut between any two of them.
  std::size_t num_items() const { return runs.size() + nests.size(); }
  std::uint64_t item_bytes(std::size_t item) const {
    return nests.empty() ? runs[item].size_bytes() : nests[item].size_bits() / 8;
  }

  // Checks every run in every layer against the sizes of the buffers, parts in the same order on both sides.
  // kInvalid with the numbers when a run ends beyond its buffer or the numbers of buffers do not fit.
  base::Status check(std::span<const std::uint64_t> dst_sizes,
                     std::span<const std::uint64_t> src_sizes) const;

  std::uint64_t num_parts(std::uint64_t num_dst_buffers) const {
    return num_dst_buffers / dst_buffers_per_part;
  }
};

// Token i goes from src_slots[i] to dst_slots[i], in `layers` of both geometries. kInvalid, with the numbers,
// for a slot out of its range, a destination slot given twice, lists of unequal length or of no whole pages,
// a page that a paged geometry cannot hold as one, rows of different sizes, layers that a geometry does not
// have. kUnsupported for tiles so irregular that a page takes too many nests, or in which pages share bytes.
// Padding of a tiled destination stays as it is.
base::Result<PageCopyPlan> plan_page_copy(const PageGeometry& dst, const PageGeometry& src,
                                          std::span<const std::int64_t> dst_slots,
                                          std::span<const std::int64_t> src_slots, LayerRange layers);

}  // namespace tpusync::layout
