#include "tpusync/layout/reshard.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "tpusync/layout/apply_nest.h"
#include "tpusync/layout/runs.h"

namespace tpusync::layout {

using base::Code;
using base::Result;
using base::Status;

namespace {

constexpr std::uint64_t kPieceBits = std::uint64_t{8} << 20;
constexpr std::uint64_t kStreamingBits = std::uint64_t{8} * (4 << 20);

// The indices first + i * step, i in [0, count).
struct Comb {
  std::int64_t first = 0, step = 1, count = 0;
};
using Combs = std::vector<Comb>;

// The solution of a * x = b modulo m, for gcd(a, m) = 1, in [0, m).
std::int64_t solve(std::int64_t a, std::int64_t b, std::int64_t m) {
  std::int64_t r0 = m, r1 = a % m, t0 = 0, t1 = 1;
  while (r1 != 0) {
    const std::int64_t q = r0 / r1;
    std::tie(r0, r1) = std::pair(r1, r0 - q * r1);
    std::tie(t0, t1) = std::pair(t1, t0 - q * t1);
  }
  const auto product = static_cast<__int128>(t0) * b % m;
  return static_cast<std::int64_t>((product + m) % m);
}

// The indices that both hold: again a comb. Indices and steps are below 2^48, their products are not.
Comb intersect(const Comb& a, const Comb& b) {
  using Wide = __int128;
  if (a.count == 0 || b.count == 0) return {};
  const std::int64_t gcd = std::gcd(a.step, b.step), difference = b.first - a.first;
  if (difference % gcd != 0) return {};
  // a.first + k * a.step is in b for k = k0 modulo b.step / gcd.
  const std::int64_t modulus = b.step / gcd;
  const std::int64_t wanted = (difference / gcd % modulus + modulus) % modulus;
  const std::int64_t k0 = modulus == 1 ? 0 : solve(a.step / gcd % modulus, wanted, modulus);
  const Wide step = Wide{a.step} * modulus;
  Wide first = a.first + Wide{k0} * a.step;
  const Wide begin = std::max(a.first, b.first);
  if (first < begin) first += (begin - first + step - 1) / step * step;
  const Wide last = std::min(a.first + (a.count - 1) * a.step, b.first + (b.count - 1) * b.step);
  if (first > last) return {};
  const auto count = static_cast<std::int64_t>((last - first) / step + 1);
  return {static_cast<std::int64_t>(first), count > 1 ? static_cast<std::int64_t>(step) : a.step, count};
}

// What `a` holds and `part`, a subset of it, does not: at most a head, a tail and the combs in between.
Combs subtract(const Comb& a, const Comb& part) {
  Combs out;
  const std::int64_t ratio = part.count > 1 ? part.step / a.step : 1;
  const std::int64_t head = (part.first - a.first) / a.step;
  if (head > 0) out.push_back({a.first, a.step, head});
  for (std::int64_t i = 1; i < ratio; ++i)
    out.push_back({part.first + i * a.step, part.step, part.count - 1});
  const std::int64_t end = head + (part.count - 1) * ratio + 1;
  if (end < a.count) out.push_back({a.first + end * a.step, a.step, a.count - end});
  return out;
}

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

// The map of every k-th index from `first` on: what a comb picks out of a shard.
Result<AxisMap> combed(const AxisMap& map, std::uint64_t first, std::uint64_t step) {
  constexpr std::uint64_t kPeriodMax = std::uint64_t{1} << 22;
  const std::uint64_t period = map.period() / std::gcd(map.period(), step);
  if (period > kPeriodMax) return base::fail(Code::kUnsupported, "indices that repeat too late");
  AxisMap out{.stride = map(first + period * step) - map(first), .within = {}};
  for (std::uint64_t i = 0; i < period; ++i) out.within.push_back(map(first + i * step));
  return out;
}

// The maps of a box inside a shard, starting at index 0.
Result<std::vector<AxisMap>> maps_of(const Shard& shard, const CombBox& box) {
  std::vector<AxisMap> maps;
  for (std::size_t dim = 0; dim < box.size(); ++dim) {
    auto axis = axis_of(shard, dim);
    if (!axis) return tl::unexpected(std::move(axis).error());
    const auto first = static_cast<std::uint64_t>((box[dim].first - shard.origin[dim]) / shard.step[dim]);
    const auto step = static_cast<std::uint64_t>(box[dim].count > 1 ? box[dim].step / shard.step[dim] : 1);
    auto map = combed(*axis, first, step);
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
  if (live == shard.layout.padded_elements()) return std::vector<CopyRun>();
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

void zero(std::byte* at, const CopyRun& run) {
  for (std::uint64_t i = 0; i < run.count; ++i)
    std::memset(at + run.dst_offset + i * run.dst_stride, 0, run.length);
}

bool overlap(const std::byte* a, std::size_t a_size, const std::byte* b, std::size_t b_size) {
  return a < b + b_size && b < a + a_size;
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

std::uint64_t ReshardPlan::moved_bits() const {
  std::uint64_t bits = 0;
  for (const PlanStep& step : steps) {
    for (const CopyNest& nest : step.nests) bits += nest.size_bits();
  }
  return bits;
}

Status ReshardPlan::check(std::span<const std::span<std::byte>> dst,
                          std::span<const std::span<const std::byte>> src) const {
  if (dst.size() != dst_bytes.size() || src.size() != src_bytes.size()) {
    return base::fail(Code::kInvalid,
                      fmt::format("plan for {} to {} buffers, given {} to {}", src_bytes.size(),
                                  dst_bytes.size(), src.size(), dst.size()));
  }
  for (std::size_t i = 0; i < src.size(); ++i) {
    if (src[i].size() == src_bytes[i]) continue;
    return base::fail(Code::kInvalid,
                      fmt::format("source {} has {} bytes, must have {}", i, src[i].size(), src_bytes[i]));
  }
  for (std::size_t i = 0; i < dst.size(); ++i) {
    if (dst[i].size() != dst_bytes[i]) {
      return base::fail(Code::kInvalid, fmt::format("destination {} has {} bytes, must have {}", i,
                                                    dst[i].size(), dst_bytes[i]));
    }
    for (std::size_t j = 0; j < src.size(); ++j) {
      if (overlap(dst[i].data(), dst[i].size(), src[j].data(), src[j].size())) {
        return base::fail(Code::kInvalid, fmt::format("destination {} overlaps source {}", i, j));
      }
    }
    for (std::size_t j = 0; j < i; ++j) {
      if (overlap(dst[i].data(), dst[i].size(), dst[j].data(), dst[j].size())) {
        return base::fail(Code::kInvalid, fmt::format("destinations {} and {} overlap", j, i));
      }
    }
  }
  return {};
}

void ReshardPlan::apply_piece(std::span<const std::span<std::byte>> dst,
                              std::span<const std::span<const std::byte>> src, std::size_t piece,
                              std::size_t num_pieces, const ShuffleKernels& kernels) const {
  if (piece == 0) {
    for (std::size_t i = 0; i < dst.size(); ++i) {
      for (const CopyRun& run : dst_padding[i]) zero(dst[i].data(), run);
    }
  }
  const Stores stores = moved_bits() >= kStreamingBits ? Stores::kStreaming : Stores::kCached;
  for (const PlanStep& step : steps) {
    for (const CopyNest& nest : step.nests) {
      const CopyNest part = num_pieces == 1 ? nest : piece_of(nest, piece, num_pieces);
      apply_nest(dst[step.dst].data(), src[step.src].data(), part, kernels, stores);
    }
  }
  streaming_fence();
}

Status ReshardPlan::apply(std::span<const std::span<std::byte>> dst,
                          std::span<const std::span<const std::byte>> src, base::ParallelFor& loop,
                          const ShuffleKernels& kernels) const {
  TPUSYNC_TRY(check(dst, src));
  const std::size_t pieces = std::min<std::uint64_t>(loop.width(), moved_bits() / kPieceBits + 1);
  if (pieces == 1) {
    apply_piece(dst, src, 0, 1, kernels);
    return {};
  }
  // Padding first: where it is a whole buffer, elements are written over it.
  loop.run(dst.size(), [&](std::size_t i) {
    for (const CopyRun& run : dst_padding[i]) zero(dst[i].data(), run);
  });
  loop.run(pieces, [&](std::size_t piece) {
    const Stores stores = moved_bits() >= kStreamingBits ? Stores::kStreaming : Stores::kCached;
    for (const PlanStep& step : steps) {
      for (const CopyNest& nest : step.nests) {
        apply_nest(dst[step.dst].data(), src[step.src].data(), piece_of(nest, piece, pieces), kernels,
                   stores);
      }
    }
    streaming_fence();
  });
  return {};
}

std::string ReshardPlan::describe() const {
  std::string out = fmt::format("{} sources, {} destinations, {} bytes moved\n", src_bytes.size(),
                                dst_bytes.size(), (moved_bits() + 7) / 8);
  for (const PlanStep& step : steps) {
    std::array<std::uint64_t, 8> bits_by_kernel{};
    std::uint64_t smallest = UINT64_MAX;
    for (const CopyNest& nest : step.nests) {
      bits_by_kernel[static_cast<std::size_t>(kernel_of(nest))] += nest.size_bits();
      smallest = std::min(smallest, nest.length);
    }
    out += fmt::format("{} -> {}:", step.src, step.dst);
    for (std::size_t k = 0; k < bits_by_kernel.size(); ++k) {
      if (bits_by_kernel[k] == 0) continue;
      out +=
          fmt::format(" {} {} bytes", kernel_name(static_cast<NestKernel>(k)), (bits_by_kernel[k] + 7) / 8);
    }
    out += fmt::format(", {} loops, pieces of {} bytes and more\n", step.nests.size(), smallest / 8);
  }
  return out;
}

}  // namespace tpusync::layout
