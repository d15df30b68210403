#include "tpusync/layout/tiled_layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

namespace tpusync::layout {

using base::Code;
using base::Result;
using base::Status;

namespace {

// One dimension of the shape under construction: its size and how its coordinate is made from the index of an
// array dimension, by divisions and remainders one after the other.
struct Step {
  bool divide;  // else remainder
  std::uint64_t by;
};

struct Physical {
  std::uint64_t size = 1;
  std::size_t dim = 0;
  bool constant = false;  // added in front for a tile longer than the shape: always 0
  std::vector<Step> steps;

  std::uint64_t coordinate(std::uint64_t index) const {
    for (const Step& step : steps) index = step.divide ? index / step.by : index % step.by;
    return constant ? 0 : index;
  }
  bool quotient() const {
    return !constant && std::ranges::all_of(steps, [](const Step& step) { return step.divide; });
  }
};

tl::unexpected<base::Error> refuse(Code code, const LayoutSpec& spec, std::span<const std::int64_t> dims,
                                   std::string_view what) {
  return base::fail(code, fmt::format("layout '{}' of [{}]: {}", to_text(spec), fmt::join(dims, ","), what));
}

Status check_dims(const LayoutSpec& spec, std::span<const std::int64_t> dims) {
  if (dims.size() > TiledLayout::kRankMax) {
    return refuse(Code::kUnsupported, spec, dims,
                  fmt::format("rank {}, at most {}", dims.size(), TiledLayout::kRankMax));
  }
  for (const std::int64_t dim : dims) {
    if (dim < 0) return refuse(Code::kInvalid, spec, dims, fmt::format("dimension {} is negative", dim));
  }
  if (spec.minor_to_major.size() != dims.size()) {
    return refuse(
        Code::kInvalid, spec, dims,
        fmt::format("{} dimensions in the layout, {} in the array", spec.minor_to_major.size(), dims.size()));
  }
  std::vector<bool> seen(dims.size());
  for (const std::int64_t dim : spec.minor_to_major) {
    if (dim < 0 || static_cast<std::size_t>(dim) >= dims.size() || seen[dim]) {
      return refuse(Code::kInvalid, spec, dims, "minor_to_major is no permutation of the dimensions");
    }
    seen[dim] = true;
  }
  return {};
}

Status check_tiles(const LayoutSpec& spec, std::span<const std::int64_t> dims) {
  if (spec.tiles.size() > TiledLayout::kTileLevelsMax)
    return refuse(Code::kUnsupported, spec, dims, "too many tiles");
  for (const auto& tile : spec.tiles) {
    std::int64_t elements = 1;
    if (tile.empty() || tile.size() > TiledLayout::kRankMax)
      return refuse(Code::kInvalid, spec, dims, "a tile of no rank");
    for (const std::int64_t size : tile) {
      if (size < 1) return refuse(Code::kInvalid, spec, dims, fmt::format("a tile of size {}", size));
      if (size > TiledLayout::kTileElementsMax || (elements *= size) > TiledLayout::kTileElementsMax) {
        return refuse(Code::kUnsupported, spec, dims,
                      fmt::format("a tile of more than {} elements", TiledLayout::kTileElementsMax));
      }
    }
  }
  return {};
}

Status check_bits(const DType& dtype, const LayoutSpec& spec, std::span<const std::int64_t> dims) {
  if (spec.memory_space < 0) return refuse(Code::kInvalid, spec, dims, "a negative memory space");
  const std::int64_t bits = spec.element_bits;
  const bool fits = bits == 0 || bits == dtype.bits || bits == dtype.storage_bits();
  if (fits) return {};
  return refuse(Code::kUnsupported, spec, dims,
                fmt::format("E({}) for {}, whose elements have {} bits", bits, dtype.name, dtype.bits));
}

// The shape after one more tile: (what was in front, which tile, where inside it).
std::vector<Physical> apply_tile(std::vector<Physical> shape, const std::vector<std::int64_t>& tile) {
  while (shape.size() < tile.size())
    shape.insert(shape.begin(), Physical{.size = 1, .dim = 0, .constant = true, .steps = {}});
  const std::size_t lead = shape.size() - tile.size();
  std::vector<Physical> inside;
  for (std::size_t i = 0; i < tile.size(); ++i) {
    const auto by = static_cast<std::uint64_t>(tile[i]);
    Physical within = shape[lead + i];
    within.steps.push_back({false, by});
    within.size = by;
    inside.push_back(std::move(within));
    shape[lead + i].steps.push_back({true, by});
    shape[lead + i].size = (shape[lead + i].size + by - 1) / by;
  }
  shape.insert(shape.end(), inside.begin(), inside.end());
  return shape;
}

std::uint64_t period_of(const std::vector<Physical>& shape, std::size_t dim) {
  std::uint64_t period = 1;
  for (const Physical& physical : shape) {
    if (physical.dim != dim || !physical.quotient()) continue;
    for (const Step& step : physical.steps) period *= step.by;  // at most kTileElementsMax^kTileLevelsMax
  }
  return period;
}

}  // namespace

Result<TiledLayout> TiledLayout::parse(std::string_view text, DType dtype,
                                       std::span<const std::int64_t> dims) {
  auto spec = parse_layout_spec(text);
  if (!spec) return tl::unexpected(std::move(spec).error());
  return make(dtype, dims, *std::move(spec));
}

Result<TiledLayout> TiledLayout::linear(DType dtype, std::span<const std::int64_t> dims) {
  LayoutSpec spec;
  for (std::size_t i = dims.size(); i > 0; --i)
    spec.minor_to_major.push_back(static_cast<std::int64_t>(i - 1));
  return make(dtype, dims, std::move(spec));
}

Result<TiledLayout> TiledLayout::make(DType dtype, std::span<const std::int64_t> dims, LayoutSpec spec) {
  TPUSYNC_TRY(check_dims(spec, dims));
  TPUSYNC_TRY(check_tiles(spec, dims));
  TPUSYNC_TRY(check_bits(dtype, spec, dims));
  TiledLayout layout;
  layout.dtype_ = dtype;
  layout.dims_.assign(dims.begin(), dims.end());
  layout.element_bits_ =
      spec.element_bits != 0 ? static_cast<std::uint64_t>(spec.element_bits) : dtype.storage_bits();
  if (spec.element_bits == dtype.storage_bits()) spec.element_bits = 0;
  layout.spec_ = std::move(spec);
  TPUSYNC_TRY(layout.place());
  return layout;
}

Status TiledLayout::place() {
  std::vector<Physical> shape;
  for (std::size_t i = rank(); i > 0; --i) {
    const auto dim = static_cast<std::size_t>(spec_.minor_to_major[i - 1]);
    shape.push_back(
        {.size = static_cast<std::uint64_t>(dims_[dim]), .dim = dim, .constant = false, .steps = {}});
  }
  for (const auto& tile : spec_.tiles) shape = apply_tile(std::move(shape), tile);

  // Strides from the most minor dimension up. An empty array has nothing in it, but its maps stay well
  // defined.
  std::vector<std::uint64_t> strides(shape.size());
  std::uint64_t elements = 1;
  for (std::size_t i = shape.size(); i > 0; --i) {
    strides[i - 1] = elements;
    const std::uint64_t size = std::max<std::uint64_t>(1, shape[i - 1].size);
    if (__builtin_mul_overflow(elements, size, &elements) || elements > kPaddedBitsMax / element_bits_) {
      return refuse(Code::kInvalid, spec_, dims_, fmt::format("more than 2^60 bits with its padding"));
    }
  }
  const bool empty = std::ranges::find(dims_, 0) != dims_.end();
  padded_elements_ = empty ? 0 : elements;

  axes_.resize(rank());
  for (std::size_t dim = 0; dim < rank(); ++dim) {
    const std::uint64_t period = period_of(shape, dim);
    if (period > static_cast<std::uint64_t>(kTileElementsMax)) {
      return refuse(Code::kUnsupported, spec_, dims_,
                    fmt::format("tiles that repeat after {} elements only", period));
    }
    axes_[dim].within.assign(period, 0);
    for (std::size_t i = 0; i < shape.size(); ++i) {
      if (shape[i].constant || shape[i].dim != dim) continue;
      if (shape[i].quotient()) {
        axes_[dim].stride = strides[i];
        continue;
      }
      for (std::uint64_t index = 0; index < period; ++index) {
        axes_[dim].within[index] += shape[i].coordinate(index) * strides[i];
      }
    }
  }
  return {};
}

std::uint64_t TiledLayout::num_elements() const {
  std::uint64_t elements = 1;
  for (const std::int64_t dim : dims_) elements *= static_cast<std::uint64_t>(dim);
  return padded_elements_ == 0 ? 0 : elements;
}

std::optional<std::uint64_t> TiledLayout::page_bytes() const {
  if (rank() == 0 || dims_[0] == 0 || spec_.minor_to_major.back() != 0) return std::nullopt;
  if (!spec_.tiles.empty() && spec_.tiles[0].size() >= rank()) return std::nullopt;
  const std::uint64_t page_bits = axes_[0].stride * element_bits_;
  // A later tile that reaches over the first one's suffix would tear the page.
  if (axes_[0].period() != 1 || page_bits % 8 != 0) return std::nullopt;
  if (axes_[0].stride * static_cast<std::uint64_t>(dims_[0]) != padded_elements_) return std::nullopt;
  return page_bits / 8;
}

std::uint64_t TiledLayout::offset_elements(std::span<const std::int64_t> index) const {
  std::uint64_t offset = 0;
  for (std::size_t dim = 0; dim < rank(); ++dim) offset += axes_[dim](static_cast<std::uint64_t>(index[dim]));
  return offset;
}

}  // namespace tpusync::layout
