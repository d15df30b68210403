// The tokens of a page from tiles into any other geometry, and back: one plan, whatever the two are.
#pragma once

#include "tpusync/layout/copy_nest.h"
#include "tpusync/layout/page_geometry.h"

namespace tpusync::layout {

// Slots [slot, slot + size) of a part, all within one span of the geometry.
struct SlotSpan {
  const PageGeometry& geometry;
  std::uint64_t slot;
};

// Appends the nests that move `num_tokens` tokens in layer 0. At least one of the two is in tiles, and their
// rows are equally long. kInvalid where elements have other sizes or do not fit the strides of the other
// side; kUnsupported as plan_page_copy.
base::Status append_tiled_span(const SlotSpan& dst, const SlotSpan& src, std::uint64_t num_tokens,
                               std::vector<CopyNest>& nests);

}  // namespace tpusync::layout
