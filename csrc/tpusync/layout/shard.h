// How an array of many dimensions is cut into shards, each with a layout of its own.
#pragma once

#include <cstdint>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/layout/axis_map.h"
#include "tpusync/layout/tiled_layout.h"

namespace tpusync::layout {

// A value. Holds the global indices origin + i * step for i in [0, extent), per global dimension.
//
// `axes` says for each global dimension which dimensions of the layout its index is split over, major first:
// tokens that lie in pages as (page, token of the page), heads that are packed as (group, head of the group).
// Empty: one to one. A single layout dimension may be larger than the extent (head_dim 576 in 640): the rest
// is padding.
struct Shard {
  Dims origin;
  Dims extent;
  Dims step;  // empty: all 1
  TiledLayout layout;
  std::vector<std::vector<std::size_t>> axes;

  friend bool operator==(const Shard&, const Shard&) = default;
};

// A value.
struct ShardSpec {
  Dims dims;  // of the global array
  DType dtype;
  std::vector<Shard> shards;

  friend bool operator==(const ShardSpec&, const ShardSpec&) = default;
};

// Fills in what is left empty and checks every shard against the array: ranks, ranges, dtype, axes. kInvalid
// with the shard and the numbers.
base::Status complete(ShardSpec& spec);

// How the index of a global dimension inside a completed shard is placed.
base::Result<AxisMap> axis_of(const Shard& shard, std::size_t dim);

}  // namespace tpusync::layout
