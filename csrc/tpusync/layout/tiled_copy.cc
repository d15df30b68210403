#include "tpusync/layout/tiled_copy.h"

#include <fmt/format.h>

#include <algorithm>

namespace tpusync::layout {

using base::Code;
using base::Result;
using base::Status;

namespace {

// Where (slot, head, element) lies on one side, in elements; everything is `base_bits` further on.
struct Side {
  AxisMap slots, heads, elements;
  std::uint64_t first_slot = 0;
  std::uint64_t base_bits = 0;
};

constexpr std::uint64_t kOffsetMax = std::uint64_t{1}
                                     << 56;  // in bytes, so that places in bits cannot overflow

// A side that is not in tiles, of heads as long as those of the other one.
Result<Side> linear_side(const SlotSpan& span, std::uint64_t element_bits, std::uint64_t head_bytes) {
  const PageGeometry& g = span.geometry;
  const std::uint64_t head_stride = g.whole_rows() ? head_bytes : g.head_stride();
  if (std::max({head_stride, g.token_stride(), g.offset(g.num_slots() - 1, g.num_heads() - 1)}) >
      kOffsetMax) {
    return base::fail(Code::kUnsupported, "page copy: a pool of more than 2^56 bytes");
  }
  if (head_stride * 8 % element_bits != 0 || g.token_stride() * 8 % element_bits != 0) {
    return base::fail(
        Code::kInvalid,
        fmt::format("page copy: heads {} bytes and tokens {} bytes apart for elements of {} bits",
                    head_stride, g.token_stride(), element_bits));
  }
  return Side{.slots = {.stride = g.token_stride() * 8 / element_bits},
              .heads = {.stride = head_stride * 8 / element_bits},
              .elements = {.stride = 1},
              .first_slot = 0,
              .base_bits = g.offset(span.slot, 0) * 8};
}

Result<Side> side_of(const SlotSpan& span, const TiledPool& tiles) {
  const TiledPool* own = span.geometry.tiles();
  if (own == nullptr) return linear_side(span, tiles.layer().element_bits(), tiles.head_bytes());
  if (own->layer().element_bits() != tiles.layer().element_bits() ||
      own->head_bytes() != tiles.head_bytes()) {
    return base::fail(
        Code::kInvalid,
        fmt::format("page copy: heads of {} bytes in elements of {} bits for heads of {} bytes in {} bits",
                    own->head_bytes(), own->layer().element_bits(), tiles.head_bytes(),
                    tiles.layer().element_bits()));
  }
  return Side{own->slots(), own->heads(), own->elements(), span.slot, 0};
}

}  // namespace

Status append_tiled_span(const SlotSpan& dst, const SlotSpan& src, std::uint64_t num_tokens,
                         std::vector<CopyNest>& nests) {
  const TiledPool& tiles = *(dst.geometry.tiles() ? dst.geometry.tiles() : src.geometry.tiles());
  const auto to = side_of(dst, tiles), from = side_of(src, tiles);
  if (!to || !from) return tl::unexpected(!to ? to.error() : from.error());
  const AxisCopy axes[] = {{from->slots, to->slots, from->first_slot, to->first_slot, num_tokens},
                           {from->heads, to->heads, 0, 0, tiles.num_heads()},
                           {from->elements, to->elements, 0, 0, tiles.num_elements()}};
  auto found = nests_of(axes, tiles.layer().element_bits());
  if (!found) return tl::unexpected(std::move(found).error());
  for (CopyNest& nest : *found) {
    nest.src_offset += from->base_bits;
    nest.dst_offset += to->base_bits;
    // Two threads would write the same byte.
    if (!nest.in_bytes()) return base::fail(Code::kUnsupported, "page copy: pages that share bytes");
    nests.push_back(std::move(nest));
  }
  return {};
}

}  // namespace tpusync::layout
