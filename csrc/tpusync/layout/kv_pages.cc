#include "tpusync/layout/kv_pages.h"

#include <fmt/format.h>

#include <utility>

#include "tpusync/layout/convert.h"
#include "tpusync/layout/runs.h"

namespace tpusync::layout {

using base::Code;
using base::Result;
using base::Status;

Result<KvPages> KvPages::make(TiledLayout layer, std::int64_t page_indices) {
  if (layer.rank() == 0 || page_indices < 1 || layer.dims()[0] % page_indices != 0) {
    return base::fail(Code::kInvalid, fmt::format("KV pages of {} indices in layout {} of {} dimensions",
                                                  page_indices, layer.text(), layer.rank()));
  }
  Dims dims = layer.dims();
  dims[0] = page_indices;
  LayoutSpec spec;
  for (std::size_t i = dims.size(); i > 0; --i)
    spec.minor_to_major.push_back(static_cast<std::int64_t>(i - 1));
  spec.element_bits = static_cast<std::int64_t>(layer.element_bits());
  auto page = TiledLayout::make(layer.dtype(), dims, std::move(spec));
  if (!page) return tl::unexpected(std::move(page).error());
  return KvPages(std::move(layer), *std::move(page), page_indices);
}

KvPages::KvPages(TiledLayout layer, TiledLayout page, std::int64_t page_indices)
    : layer_(std::move(layer)),
      page_(std::move(page)),
      page_indices_(page_indices),
      page_bytes_(page_.padded_bytes()) {}

Status KvPages::check_page(std::int64_t page) const {
  if (page >= 0 && page < num_pages()) return {};
  return base::fail(Code::kInvalid, fmt::format("page {} is not in [0, {})", page, num_pages()));
}

Dims KvPages::origin_of(std::int64_t page) const {
  Dims origin(layer_.rank());
  origin[0] = page * page_indices_;
  return origin;
}

Result<std::vector<CopyRun>> KvPages::runs(std::int64_t page) const {
  TPUSYNC_TRY(check_page(page));
  std::vector<AxisRange> box;
  for (std::size_t dim = 0; dim < layer_.rank(); ++dim) {
    box.push_back({.map = layer_.axis(dim),
                   .origin = dim == 0 ? static_cast<std::uint64_t>(page * page_indices_) : 0,
                   .count = static_cast<std::uint64_t>(page_.dims()[dim])});
  }
  return runs_of(box, layer_.element_bits());
}

Result<std::vector<CopyNest>> KvPages::to_linear(std::int64_t page) const {
  TPUSYNC_TRY(check_page(page));
  return plan_box(page_, Dims(layer_.rank()), layer_, {origin_of(page), page_.dims()});
}

Result<std::vector<CopyNest>> KvPages::from_linear(std::int64_t page) const {
  TPUSYNC_TRY(check_page(page));
  return plan_box(layer_, origin_of(page), page_, {Dims(layer_.rank()), page_.dims()});
}

}  // namespace tpusync::layout
