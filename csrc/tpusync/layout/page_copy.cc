#include "tpusync/layout/page_copy.h"

#include <fmt/format.h>

#include <algorithm>

#include "tpusync/layout/tiled_copy.h"

namespace tpusync::layout {

using base::Code;
using base::Result;
using base::Status;

namespace {

// Pools are at most 2^62 bytes: adding a layer's offset to this cannot overflow either.
constexpr std::uint64_t kBeyondAnyBuffer = std::uint64_t{1} << 63;

// Which slots were named already.
class SlotSet {
 public:
  explicit SlotSet(std::uint64_t num_slots) : words_((num_slots + 63) / 64) {}

  // Adds [first, first + size); false if one of them was there.
  bool insert(std::uint64_t first, std::uint64_t size) {
    while (size > 0) {
      const std::uint64_t bit = first % 64, step = std::min(64 - bit, size);
      const std::uint64_t mask = (step == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << step) - 1) << bit;
      std::uint64_t& word = words_[first / 64];
      if (word & mask) return false;
      word |= mask;
      first += step;
      size -= step;
    }
    return true;
  }

 private:
  std::vector<std::uint64_t> words_;
};

Status check_shapes(const PageGeometry& dst, const PageGeometry& src, LayerRange layers) {
  if (dst.row_bytes() != src.row_bytes()) {
    return base::fail(Code::kInvalid, fmt::format("page copy: rows of {} bytes to rows of {} bytes",
                                                  src.row_bytes(), dst.row_bytes()));
  }
  if (!dst.whole_rows() && !src.whole_rows() && dst.num_heads() != src.num_heads()) {
    return base::fail(Code::kInvalid,
                      fmt::format("page copy: {} heads to {} heads", src.num_heads(), dst.num_heads()));
  }
  const auto num_layers = static_cast<std::int64_t>(std::min(dst.num_layers(), src.num_layers()));
  if (layers.begin < 0 || layers.end < layers.begin || layers.end > num_layers) {
    return base::fail(Code::kInvalid,
                      fmt::format("page copy: layers [{}, {}) of {}", layers.begin, layers.end, num_layers));
  }
  return {};
}

Status check_lists(const PageGeometry& geometry, const char* side, std::size_t num_tokens) {
  if (num_tokens % geometry.page_size() == 0) return {};
  return base::fail(Code::kInvalid,
                    fmt::format("page copy: {} tokens are no multiple of the page size {} of the {}",
                                num_tokens, geometry.page_size(), side));
}

Status check_slot(const PageGeometry& geometry, const char* side, std::int64_t slot, std::size_t token) {
  if (slot >= 0 && static_cast<std::uint64_t>(slot) < geometry.num_slots()) return {};
  return base::fail(Code::kInvalid, fmt::format("page copy: {} slot {} of token {} is not in [0, {})", side,
                                                slot, token, geometry.num_slots()));
}

// In a paged geometry token i of a list must be token i % page_size of its page, and pages must not be torn.
Status check_pages(const PageGeometry& geometry, const char* side, std::span<const std::int64_t> slots) {
  if (!geometry.paged()) return {};
  const std::size_t page_size = geometry.page_size();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::size_t within = i % page_size;
    const auto slot = static_cast<std::uint64_t>(slots[i]),
               first = static_cast<std::uint64_t>(slots[i - within]);
    if (slot % page_size == within && slot == first + within) continue;
    return base::fail(Code::kInvalid,
                      fmt::format("page copy: {} slot {} of token {} is not token {} of a page of {}", side,
                                  slots[i], i, within, page_size));
  }
  return {};
}

// Rows that follow each other at a constant stride on both sides.
struct Span {
  std::uint64_t dst_slot, src_slot, size;
};

// Tokens from `at` on whose slots go up by one on both sides, within one span of each geometry.
Span next_span(const PageGeometry& dst, const PageGeometry& src, std::span<const std::int64_t> dst_slots,
               std::span<const std::int64_t> src_slots, std::size_t at) {
  const auto d = static_cast<std::uint64_t>(dst_slots[at]), s = static_cast<std::uint64_t>(src_slots[at]);
  const auto room = [](const PageGeometry& g, std::uint64_t slot) {
    return std::min(g.span_slots() - slot % g.span_slots(), g.num_slots() - slot);
  };
  const std::uint64_t limit = std::min({room(dst, d), room(src, s), std::uint64_t(dst_slots.size() - at)});
  std::uint64_t size = 1;
  while (size < limit && std::uint64_t(dst_slots[at + size]) == d + size &&
         std::uint64_t(src_slots[at + size]) == s + size) {
    ++size;
  }
  return {d, s, size};
}

void append_span(const PageGeometry& dst, const PageGeometry& src, const Span& span,
                 std::vector<CopyRun>& runs) {
  const CopyRun rows{.src_offset = src.offset(span.src_slot, 0),
                     .dst_offset = dst.offset(span.dst_slot, 0),
                     .length = dst.row_bytes(),
                     .count = span.size,
                     .src_stride = src.token_stride(),
                     .dst_stride = dst.token_stride()};
  if (dst.whole_rows() && src.whole_rows()) return append_merged(runs, canonical(rows));
  const PageGeometry& split = dst.whole_rows() ? src : dst;
  const std::uint64_t heads = split.num_heads(), head_bytes = split.head_bytes();
  const std::uint64_t src_head = src.whole_rows() ? head_bytes : src.head_stride();
  const std::uint64_t dst_head = dst.whole_rows() ? head_bytes : dst.head_stride();
  // The longer of the two dimensions becomes the count of a run.
  const bool by_head = span.size >= heads;
  for (std::uint64_t i = 0; i < (by_head ? heads : span.size); ++i) {
    CopyRun run = rows;
    run.length = head_bytes;
    run.src_offset += i * (by_head ? src_head : src.token_stride());
    run.dst_offset += i * (by_head ? dst_head : dst.token_stride());
    if (!by_head) {
      run.count = heads;
      run.src_stride = src_head;
      run.dst_stride = dst_head;
    }
    append_merged(runs, canonical(run));
  }
}

Status check_side(const char* side, std::span<const std::uint64_t> sizes, const PageCopyPlan& plan,
                  std::uint64_t runs_end, std::uint64_t layer_stride, std::uint64_t buffers_per_part) {
  for (std::uint64_t at = 0; at < sizes.size(); ++at) {
    const bool per_layer = layer_stride == 0;
    const std::uint64_t layer = at % buffers_per_part;
    if (per_layer && (layer < plan.first_layer || layer >= plan.first_layer + plan.num_layers)) continue;
    const std::uint64_t last_layer = per_layer ? layer : plan.first_layer + plan.num_layers - 1;
    const std::uint64_t end = runs_end + last_layer * layer_stride;
    if (end > sizes[at]) {
      return base::fail(Code::kInvalid,
                        fmt::format("page copy: bytes up to {} of layer {} in {} buffer {} of {} bytes", end,
                                    last_layer, side, at, sizes[at]));
    }
  }
  return {};
}

}  // namespace

Result<PageCopyPlan> plan_page_copy(const PageGeometry& dst, const PageGeometry& src,
                                    std::span<const std::int64_t> dst_slots,
                                    std::span<const std::int64_t> src_slots, LayerRange layers) {
  TPUSYNC_TRY(check_shapes(dst, src, layers));
  if (dst_slots.size() != src_slots.size()) {
    return base::fail(Code::kInvalid, fmt::format("page copy: {} source slots for {} destination slots",
                                                  src_slots.size(), dst_slots.size()));
  }
  TPUSYNC_TRY(check_lists(dst, "destination", dst_slots.size()));
  TPUSYNC_TRY(check_lists(src, "source", src_slots.size()));
  TPUSYNC_TRY(check_pages(dst, "destination", dst_slots));
  TPUSYNC_TRY(check_pages(src, "source", src_slots));

  PageCopyPlan plan{.runs = {},
                    .nests = {},
                    .first_layer = std::uint64_t(layers.begin),
                    .num_layers = std::uint64_t(layers.end - layers.begin),
                    .src_layer_stride = src.layer_stride(),
                    .dst_layer_stride = dst.layer_stride(),
                    .src_buffers_per_part = src.buffers_per_part(),
                    .dst_buffers_per_part = dst.buffers_per_part(),
                    .size_bytes_per_part = 0};
  SlotSet seen(dst.num_slots());
  for (std::size_t at = 0; at < dst_slots.size();) {
    TPUSYNC_TRY(check_slot(dst, "destination", dst_slots[at], at));
    TPUSYNC_TRY(check_slot(src, "source", src_slots[at], at));
    const Span span = next_span(dst, src, dst_slots, src_slots, at);
    if (!seen.insert(span.dst_slot, span.size)) {
      return base::fail(Code::kInvalid,
                        fmt::format("page copy: a destination slot in [{}, {}) is given twice", span.dst_slot,
                                    span.dst_slot + span.size));
    }
    if (dst.tiles() || src.tiles()) {
      TPUSYNC_TRY(append_tiled_span({dst, span.dst_slot}, {src, span.src_slot}, span.size, plan.nests));
    } else {
      append_span(dst, src, span, plan.runs);
    }
    at += span.size;
  }
  plan.size_bytes_per_part = dst.row_bytes() * dst_slots.size() * plan.num_layers;
  return plan;
}

Status PageCopyPlan::check(std::span<const std::uint64_t> dst_sizes,
                           std::span<const std::uint64_t> src_sizes) const {
  if (dst_sizes.size() % dst_buffers_per_part != 0 || src_sizes.size() % src_buffers_per_part != 0 ||
      dst_sizes.size() / dst_buffers_per_part != src_sizes.size() / src_buffers_per_part) {
    return base::fail(
        Code::kInvalid,
        fmt::format("page copy: {} source buffers at {} a part for {} destination buffers at {} a part",
                    src_sizes.size(), src_buffers_per_part, dst_sizes.size(), dst_buffers_per_part));
  }
  if (num_items() == 0 || num_layers == 0) return {};
  std::uint64_t dst_runs_end = 0, src_runs_end = 0;
  for (const CopyRun& run : runs) {
    dst_runs_end = std::max(dst_runs_end, dst_end(run).value_or(kBeyondAnyBuffer));
    src_runs_end = std::max(src_runs_end, src_end(run).value_or(kBeyondAnyBuffer));
  }
  for (const CopyNest& nest : nests) {
    dst_runs_end = std::max(dst_runs_end, nest.dst_end() / 8);
    src_runs_end = std::max(src_runs_end, nest.src_end() / 8);
  }
  TPUSYNC_TRY(
      check_side("destination", dst_sizes, *this, dst_runs_end, dst_layer_stride, dst_buffers_per_part));
  return check_side("source", src_sizes, *this, src_runs_end, src_layer_stride, src_buffers_per_part);
}

}  // namespace tpusync::layout
