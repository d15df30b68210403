#include "tpusync/layout/page_geometry.h"

#include <fmt/format.h>

#include <initializer_list>
#include <utility>

#include "tpusync/layout/runs.h"

namespace tpusync::layout {

using base::Code;
using base::Result;
using base::Status;

namespace {

constexpr std::uint64_t kPoolBytesMax = std::uint64_t{1} << 62;
constexpr std::int64_t kNumSlotsMax = std::int64_t{1} << 31;  // plans keep a bit per slot

using Named = std::pair<const char*, std::int64_t>;

Status check_positive(std::initializer_list<Named> values) {
  for (const auto& [name, value] : values) {
    if (value < 1)
      return base::fail(Code::kInvalid, fmt::format("page geometry: {} is {}, at least 1", name, value));
  }
  return {};
}

Status check_num_slots(std::int64_t num_slots) {
  if (num_slots <= kNumSlotsMax) return {};
  return base::fail(Code::kInvalid,
                    fmt::format("page geometry: num_slots is {}, at most {}", num_slots, kNumSlotsMax));
}

// All products that are formed anywhere are at most this one, so that they cannot overflow.
Status check_pool_bytes(std::initializer_list<Named> factors) {
  std::uint64_t product = 1;
  for (const auto& [name, value] : factors) {
    if (__builtin_mul_overflow(product, static_cast<std::uint64_t>(value), &product) ||
        product > kPoolBytesMax) {
      return base::fail(Code::kInvalid,
                        fmt::format("page geometry: a pool of more than 2^62 bytes ({} = {})", name, value));
    }
  }
  return {};
}

}  // namespace

Result<HostLayout> parse_host_layout(std::string_view name) {
  if (name == "layer_first") return HostLayout::kLayerFirst;
  if (name == "page_first") return HostLayout::kPageFirst;
  if (name == "page_first_direct") return HostLayout::kPageFirstDirect;
  if (name == "page_head") return HostLayout::kPageHead;
  return base::fail(
      Code::kInvalid,
      fmt::format("host layout '{}': not one of layer_first, page_first, page_first_direct, page_head",
                  name));
}

Result<PageGeometry> PageGeometry::device(const DeviceOptions& o) {
  TPUSYNC_TRY(check_positive({{"num_layers", o.num_layers},
                              {"num_slots", o.num_slots},
                              {"row_bytes", o.row_bytes},
                              {"row_stride_bytes", o.row_stride_bytes},
                              {"page_size", o.page_size}}));
  TPUSYNC_TRY(check_num_slots(o.num_slots));
  if (o.row_stride_bytes < o.row_bytes) {
    return base::fail(Code::kInvalid,
                      fmt::format("page geometry: row_stride_bytes {} is less than row_bytes {}",
                                  o.row_stride_bytes, o.row_bytes));
  }
  TPUSYNC_TRY(check_pool_bytes({{"num_layers", o.num_layers},
                                {"num_slots", o.num_slots},
                                {"row_stride_bytes", o.row_stride_bytes},
                                {"page_size", o.page_size}}));
  PageGeometry g;
  g.num_layers_ = o.num_layers;
  g.num_slots_ = o.num_slots;
  g.page_size_ = o.page_size;
  g.num_heads_ = 1;
  g.head_bytes_ = g.head_stride_ = o.row_bytes;
  g.token_stride_ = o.row_stride_bytes;
  g.page_stride_ = g.token_stride_ * g.page_size_;
  return g;
}

Result<PageGeometry> PageGeometry::host(const HostOptions& o) {
  TPUSYNC_TRY(check_positive({{"num_layers", o.num_layers},
                              {"num_slots", o.num_slots},
                              {"num_heads", o.num_heads},
                              {"head_bytes", o.head_bytes},
                              {"page_size", o.page_size}}));
  TPUSYNC_TRY(check_num_slots(o.num_slots));
  TPUSYNC_TRY(check_pool_bytes({{"num_layers", o.num_layers},
                                {"num_slots", o.num_slots},
                                {"num_heads", o.num_heads},
                                {"head_bytes", o.head_bytes},
                                {"page_size", o.page_size}}));
  const bool paged = o.layout == HostLayout::kPageFirstDirect || o.layout == HostLayout::kPageHead;
  if (paged && o.num_slots % o.page_size != 0) {
    return base::fail(
        Code::kInvalid,
        fmt::format("page geometry: num_slots {} is no multiple of page_size {}", o.num_slots, o.page_size));
  }
  PageGeometry g;
  g.num_layers_ = o.num_layers;
  g.num_slots_ = o.num_slots;
  g.page_size_ = o.page_size;
  g.num_heads_ = o.num_heads;
  g.head_bytes_ = g.head_stride_ = o.head_bytes;
  const std::uint64_t row = g.row_bytes();
  g.page_stride_ = row * g.page_size_ * g.num_layers_;
  switch (o.layout) {
    case HostLayout::kLayerFirst:
      g.token_stride_ = row;
      g.layer_stride_ = row * g.num_slots_;
      g.page_stride_ = row * g.page_size_;
      break;
    case HostLayout::kPageFirst:
      g.token_stride_ = row * g.num_layers_;
      g.layer_stride_ = row;
      break;
    case HostLayout::kPageFirstDirect:
      g.token_stride_ = row;
      g.layer_stride_ = row * g.page_size_;
      break;
    case HostLayout::kPageHead:
      g.layer_stride_ = g.head_bytes_;
      g.token_stride_ = g.layer_stride_ * g.num_layers_;
      g.head_stride_ = g.token_stride_ * g.page_size_;
      break;
  }
  return g;
}

Result<PageGeometry> PageGeometry::tiled(TiledPool layer, std::int64_t num_layers, std::int64_t page_size) {
  TPUSYNC_TRY(check_positive({{"num_layers", num_layers}, {"page_size", page_size}}));
  const auto num_slots =
      static_cast<std::int64_t>(layer.num_slots());  // a layout has less than 2^60 elements
  TPUSYNC_TRY(check_num_slots(num_slots));
  if (num_slots % page_size != 0) {
    return base::fail(
        Code::kInvalid,
        fmt::format("page geometry: num_slots {} is no multiple of page_size {}", num_slots, page_size));
  }
  TPUSYNC_TRY(check_pool_bytes(
      {{"num_layers", num_layers}, {"padded bytes of a layer", std::int64_t(layer.layer().padded_bytes())}}));
  PageGeometry g;
  g.num_layers_ = num_layers;
  g.num_slots_ = layer.num_slots();
  g.page_size_ = page_size;
  g.num_heads_ = layer.num_heads();
  g.head_bytes_ = layer.head_bytes();
  g.tiles_ = std::make_shared<const TiledPool>(std::move(layer));
  return g;
}

bool operator==(const PageGeometry& a, const PageGeometry& b) {
  const bool same_tiles = a.tiles_ && b.tiles_ ? *a.tiles_ == *b.tiles_ : a.tiles_ == b.tiles_;
  return same_tiles && a.numbers() == b.numbers();
}

Result<std::vector<CopyRun>> PageGeometry::runs(std::int64_t page, std::int64_t layer) const {
  const std::uint64_t num_pages = num_slots_ / page_size_;
  if (page < 0 || static_cast<std::uint64_t>(page) >= num_pages || layer < 0 ||
      static_cast<std::uint64_t>(layer) >= num_layers_) {
    return base::fail(Code::kInvalid, fmt::format("page geometry: page {} of {} in layer {} of {}", page,
                                                  num_pages, layer, num_layers_));
  }
  const std::uint64_t slot = static_cast<std::uint64_t>(page) * page_size_;
  if (tiles_) {
    const AxisRange box[] = {{tiles_->slots(), slot, page_size_},
                             {tiles_->heads(), 0, num_heads_},
                             {tiles_->elements(), 0, tiles_->num_elements()}};
    return runs_of(box, tiles_->layer().element_bits());
  }
  const AxisMap tokens{token_stride_}, heads{head_stride_}, bytes{1};
  const AxisRange box[] = {{tokens, 0, page_size_}, {heads, 0, num_heads_}, {bytes, 0, head_bytes_}};
  auto runs = runs_of(box, 8);
  if (!runs) return runs;
  for (CopyRun& run : *runs)
    run.src_offset += offset(slot, 0) + static_cast<std::uint64_t>(layer) * layer_stride_;
  return runs;
}

std::uint64_t PageGeometry::offset(std::uint64_t slot, std::uint64_t head) const {
  return slot / page_size_ * page_stride_ + slot % page_size_ * token_stride_ + head * head_stride_;
}

std::uint64_t PageGeometry::span_slots() const {
  return !tiles_ && page_stride_ == page_size_ * token_stride_ ? num_slots_ : page_size_;
}

}  // namespace tpusync::layout
