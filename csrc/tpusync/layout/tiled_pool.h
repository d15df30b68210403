// A KV pool of one layer in the tiles of a device, whatever the engine's shape of it, seen as an array of
// (slot, head, element):
//
//   shape                                      slots    heads   elements
//   (tokens, heads, dim)                       0        1       2         SGLang's pools
//   (pages, page_size, heads, dim)             0 1      2       3         keys or values apart
//   (pages, page_size, groups, p, dim)         0 1      2 3     4         ragged paged attention: keys and
//   values
//                                                                         of a head side by side, packed by p
//   (pages, page_size / p, p, dim)             0 1 2            3         latents of MLA, packed
//   (pages, dim, page_size)                    0 2              1         latents of MLA, transposed
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/layout/tiled_layout.h"

namespace tpusync::layout {

// A value. Immutable.
class TiledPool {
 public:
  struct Options {
    // Dimensions of the layout that each index is split over, major first; together all, each once.
    std::vector<std::size_t> slots, heads, elements;
    // Every head_step-th head from head_first on: 0 by 2 are the keys of a fused pool, 1 by 2 the values.
    std::int64_t head_first = 0, head_step = 1;
    std::int64_t num_elements = 0;  // that are used of all that there are (576 of 640); 0: all
  };

  // kInvalid where dimensions are missing, named twice or unknown, where there are no such heads or elements,
  // or where the elements of a head do not fill whole bytes.
  static base::Result<TiledPool> make(TiledLayout layer, const Options& options);

  const TiledLayout& layer() const { return layer_; }
  std::uint64_t num_slots() const { return num_slots_; }
  std::uint64_t num_heads() const { return num_heads_; }
  std::uint64_t num_elements() const { return num_elements_; }  // of a head
  std::uint64_t head_bytes() const { return num_elements_ * layer_.element_bits() / 8; }

  const AxisMap& slots() const { return slots_; }
  const AxisMap& heads() const { return heads_; }
  const AxisMap& elements() const { return elements_; }

  friend bool operator==(const TiledPool&, const TiledPool&) = default;

 private:
  explicit TiledPool(TiledLayout layer) : layer_(std::move(layer)) {}

  TiledLayout layer_;
  AxisMap slots_, heads_, elements_;
  std::uint64_t num_slots_ = 0, num_heads_ = 0, num_elements_ = 0;
};

}  // namespace tpusync::layout
