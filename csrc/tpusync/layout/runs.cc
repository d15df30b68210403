#include "tpusync/layout/runs.h"

#include <fmt/format.h>

#include <algorithm>

namespace tpusync::layout {

using base::Code;
using base::Result;

namespace {

constexpr std::uint64_t kRunsMax = std::uint64_t{1} << 22;

struct Interval {
  std::uint64_t begin, end;  // bits
};

// True when the pieces of a nest ascend in the order of its loops.
bool ascends(const CopyNest& nest) {
  std::uint64_t span = nest.length;
  for (auto loop = nest.loops.rbegin(); loop != nest.loops.rend(); ++loop) {
    if (loop->src_stride < span) return false;
    span += (loop->count - 1) * loop->src_stride;
  }
  return true;
}

std::uint64_t num_pieces(std::span<const Loop> loops) {
  std::uint64_t pieces = 1;
  for (const Loop& loop : loops) pieces = std::min(kRunsMax + 1, pieces * std::min(loop.count, kRunsMax + 1));
  return pieces;
}

template <typename Body>
void for_offsets(std::span<const Loop> loops, std::uint64_t offset, Body& body) {
  if (loops.empty()) return body(offset);
  for (std::uint64_t i = 0; i < loops[0].count; ++i) {
    for_offsets(loops.subspan(1), offset + i * loops[0].src_stride, body);
  }
}

tl::unexpected<base::Error> too_many() {
  return base::fail(Code::kExhausted, fmt::format("a box of more than {} runs", kRunsMax));
}

tl::unexpected<base::Error> torn() {
  return base::fail(Code::kInvalid,
                    "the box does not consist of whole bytes: align it to the packing of the elements");
}

// Appends in bytes, packing the destination.
class Packer {
 public:
  bool add(std::uint64_t offset_bits, std::uint64_t length_bits, std::uint64_t count,
           std::uint64_t stride_bits) {
    if (offset_bits % 8 != 0 || length_bits % 8 != 0 || (count > 1 && stride_bits % 8 != 0)) return false;
    const std::uint64_t length = length_bits / 8;
    append_merged(runs_, canonical({.src_offset = offset_bits / 8,
                                    .dst_offset = at_,
                                    .length = length,
                                    .count = count,
                                    .src_stride = stride_bits / 8,
                                    .dst_stride = length}));
    at_ += length * count;
    return true;
  }
  std::vector<CopyRun> take() { return std::move(runs_); }

 private:
  std::vector<CopyRun> runs_;
  std::uint64_t at_ = 0;
};

// Nests whose pieces ascend, one nest behind the other.
Result<std::vector<CopyRun>> in_order(std::span<const CopyNest> nests) {
  Packer packer;
  std::uint64_t entries = 0;
  for (const CopyNest& nest : nests) {
    const std::span<const Loop> loops = nest.loops;
    const std::span<const Loop> outer = loops.empty() ? loops : loops.first(loops.size() - 1);
    const Loop inner = loops.empty() ? Loop{} : loops.back();
    entries += num_pieces(outer);
    if (entries > kRunsMax) return too_many();
    bool whole = true;
    auto body = [&](std::uint64_t offset) {
      whole = whole && packer.add(offset, nest.length, inner.count, inner.src_stride);
    };
    for_offsets(outer, nest.src_offset, body);
    if (!whole) return torn();
  }
  return packer.take();
}

// Any nests: every piece for itself, sorted.
Result<std::vector<CopyRun>> sorted(std::span<const CopyNest> nests) {
  std::vector<Interval> pieces;
  for (const CopyNest& nest : nests) {
    if (pieces.size() + num_pieces(nest.loops) > kRunsMax) return too_many();
    auto body = [&](std::uint64_t offset) { pieces.push_back({offset, offset + nest.length}); };
    for_offsets(nest.loops, nest.src_offset, body);
  }
  std::ranges::sort(pieces, {}, &Interval::begin);
  Packer packer;
  for (std::size_t i = 0; i < pieces.size();) {
    Interval joined = pieces[i++];
    while (i < pieces.size() && pieces[i].begin == joined.end) joined.end = pieces[i++].end;
    if (!packer.add(joined.begin, joined.end - joined.begin, 1, 0)) return torn();
  }
  return packer.take();
}

}  // namespace

Result<std::vector<CopyRun>> runs_of(std::span<const AxisRange> box, std::uint64_t element_bits) {
  std::vector<AxisCopy> axes;
  for (const AxisRange& axis : box) {
    axes.push_back({.src = axis.map,
                    .dst = axis.map,
                    .src_origin = axis.origin,
                    .dst_origin = axis.origin,
                    .count = axis.count});
  }
  auto nests = nests_of(axes, element_bits);
  if (!nests) return tl::unexpected(std::move(nests).error());
  std::ranges::sort(*nests, {}, &CopyNest::src_offset);
  bool ordered = std::ranges::all_of(*nests, &ascends);
  for (std::size_t i = 1; i < nests->size(); ++i)
    ordered = ordered && (*nests)[i - 1].src_end() <= (*nests)[i].src_offset;
  if (!ordered) return sorted(*nests);
  auto runs = in_order(*nests);
  // Two nests may share a byte that neither fills.
  return !runs && runs.error().code == Code::kInvalid ? sorted(*nests) : std::move(runs);
}

std::vector<CopyRun> gaps_between(std::span<const CopyRun> runs, std::uint64_t size_bytes) {
  std::vector<CopyRun> gaps;
  std::uint64_t at = 0;
  const auto gap = [&](std::uint64_t begin, std::uint64_t length, std::uint64_t count, std::uint64_t stride) {
    if (length == 0 || count == 0) return;
    append_merged(gaps, canonical({.src_offset = begin,
                                   .dst_offset = begin,
                                   .length = length,
                                   .count = count,
                                   .src_stride = stride,
                                   .dst_stride = stride}));
  };
  for (const CopyRun& run : runs) {
    gap(at, run.src_offset - at, 1, 0);
    if (run.count > 1)
      gap(run.src_offset + run.length, run.src_stride - run.length, run.count - 1, run.src_stride);
    at = *src_end(run);
  }
  gap(at, size_bytes - at, 1, 0);
  return gaps;
}

}  // namespace tpusync::layout
