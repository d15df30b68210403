#include "tpusync/layout/reshard.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "tpusync/layout/comb.h"
#include "tpusync/layout/runs.h"

namespace tpusync::layout {

using base::Code;
using base::Result;
using base::Status;

namespace {

using CombBox = std::vector<Comb>;  // one per dimension

CombBox box_of(const Shard& shard) {
  CombBox box;
  for (std::size_t dim = 0; dim < shard.extent.size(); ++dim) {
    box.push_back({shard.origin[dim], shard.step[dim], shard.extent[dim]});
  }
  return box;
}

bool empty(const CombBox& box) {
  return std::ranges::any_of(box, [](const Comb& c) { return c.count == 0; });
}

CombBox intersect(const CombBox& a, const CombBox& b) {
  CombBox out;
  for (std::size_t dim = 0; dim < a.size(); ++dim) out.push_back(intersect(a[dim], b[dim]));
  return out;
}

// The boxes that together hold what `box` holds and `part`, a subset, does not.
void subtract(const CombBox& box, const CombBox& part, std::vector<CombBox>& out) {
  CombBox rest = box;
  for (std::size_t dim = 0; dim < box.size(); ++dim) {
    for (const Comb& comb : subtract(box[dim], part[dim])) {
      out.push_back(rest);
      out.back()[dim] = comb;
    }
    rest[dim] = part[dim];
  }
}

// The maps of a box inside a shard, starting at index 0.
Result<std::vector<AxisMap>> maps_of(const Shard& shard, const CombBox& box) {
  std::vector<AxisMap> maps;
  for (std::size_t dim = 0; dim < box.size(); ++dim) {
    auto axis = axis_of(shard, dim);
    if (!axis) return tl::unexpected(std::move(axis).error());
    const auto first = static_cast<std::uint64_t>((box[dim].first - shard.origin[dim]) / shard.step[dim]);
    const auto step = static_cast<std::uint64_t>(box[dim].count > 1 ? box[dim].step / shard.step[dim] : 1);
    auto map = every(*axis, first, step);
    if (!map) return tl::unexpected(std::move(map).error());
    maps.push_back(*std::move(map));
  }
  return maps;
}

Result<std::vector<CopyNest>> nests_between(const Shard& dst, const Shard& src, const CombBox& box) {
  const auto to = maps_of(dst, box), from = maps_of(src, box);
  if (!to || !from) return tl::unexpected(!to ? to.error() : from.error());
  std::vector<AxisCopy> axes;
  for (std::size_t dim = 0; dim < box.size(); ++dim) {
    axes.push_back({.src = (*from)[dim],
                    .dst = (*to)[dim],
                    .src_origin = 0,
                    .dst_origin = 0,
                    .count = static_cast<std::uint64_t>(box[dim].count)});
  }
  return nests_of(axes, src.layout.element_bits());
}

// Bytes that hold no element of the shard. The whole buffer where elements do not fill bytes or it is too
// torn.
Result<std::vector<CopyRun>> padding_of(const Shard& shard) {
  const std::uint64_t size = shard.layout.padded_bytes();
  std::uint64_t live = 1;
  for (const std::int64_t extent : shard.extent) live *= static_cast<std::uint64_t>(extent);
  if (live * shard.layout.element_bits() == size * 8) return std::vector<CopyRun>();
  std::vector<AxisMap> maps;
  for (std::size_t dim = 0; dim < shard.extent.size(); ++dim) {
    auto axis = axis_of(shard, dim);
    if (!axis) return tl::unexpected(std::move(axis).error());
    maps.push_back(*std::move(axis));
  }
  std::vector<AxisRange> box;
  for (std::size_t dim = 0; dim < maps.size(); ++dim) {
    box.push_back({.map = maps[dim], .origin = 0, .count = static_cast<std::uint64_t>(shard.extent[dim])});
  }
  const auto runs = runs_of(box, shard.layout.element_bits());
  if (!runs) return std::vector<CopyRun>{{.src_offset = 0, .dst_offset = 0, .length = size}};
  return gaps_between(*runs, size);
}

Status plan_destination(const ShardSpec& dst, const ShardSpec& src, std::size_t number, ReshardPlan& plan) {
  const Shard& to = dst.shards[number];
  std::vector<CombBox> missing{box_of(to)};
  if (empty(missing[0])) missing.clear();
  const std::size_t num_src = src.shards.size(),
                    first = number * num_src / std::max<std::size_t>(1, dst.shards.size());
  for (std::size_t k = 0; k < num_src && !missing.empty(); ++k) {
    const std::size_t from = (first + k) % num_src;
    std::vector<CombBox> still;
    PlanStep step{
        .src = static_cast<std::uint32_t>(from), .dst = static_cast<std::uint32_t>(number), .nests = {}};
    for (const CombBox& box : missing) {
      const CombBox part = intersect(box, box_of(src.shards[from]));
      if (empty(part)) {
        still.push_back(box);
        continue;
      }
      auto nests = nests_between(to, src.shards[from], part);
      if (!nests) return tl::unexpected(std::move(nests).error());
      step.nests.insert(step.nests.end(), nests->begin(), nests->end());
      subtract(box, part, still);
    }
    if (!step.nests.empty()) plan.steps.push_back(std::move(step));
    missing = std::move(still);
  }
  if (missing.empty()) return {};
  std::vector<std::int64_t> index;
  for (const Comb& comb : missing[0]) index.push_back(comb.first);
  return base::fail(Code::kInvalid, fmt::format("no source holds element [{}] of destination {}",
                                                fmt::join(index, ","), number));
}

}  // namespace

Result<ReshardPlan> plan_reshard(ShardSpec dst, ShardSpec src) {
  TPUSYNC_TRY(complete(dst));
  TPUSYNC_TRY(complete(src));
  if (dst.dims != src.dims || dst.dtype != src.dtype) {
    return base::fail(Code::kInvalid,
                      fmt::format("from {} [{}] to {} [{}]", src.dtype.name, fmt::join(src.dims, ","),
                                  dst.dtype.name, fmt::join(dst.dims, ",")));
  }
  ReshardPlan plan;
  std::optional<std::uint64_t> bits;
  for (const ShardSpec* spec : {&src, &dst}) {
    for (const Shard& shard : spec->shards) {
      (spec == &src ? plan.src_bytes : plan.dst_bytes).push_back(shard.layout.padded_bytes());
      if (bits.value_or(shard.layout.element_bits()) != shard.layout.element_bits()) {
        return base::fail(Code::kInvalid, "elements of different sizes in the layouts of the shards");
      }
      bits = shard.layout.element_bits();
    }
  }
  for (std::size_t number = 0; number < dst.shards.size(); ++number) {
    auto padding = padding_of(dst.shards[number]);
    if (!padding) return tl::unexpected(std::move(padding).error());
    plan.dst_padding.push_back(*std::move(padding));
    TPUSYNC_TRY(plan_destination(dst, src, number, plan));
  }
  return plan;
}

}  // namespace tpusync::layout
