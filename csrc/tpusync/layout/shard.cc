#include "tpusync/layout/shard.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

namespace tpusync::layout {

using base::Code;
using base::Result;
using base::Status;

namespace {

constexpr std::int64_t kDimMax = std::int64_t{1} << 48;

tl::unexpected<base::Error> refuse(std::size_t shard, std::string_view what) {
  return base::fail(Code::kInvalid, fmt::format("shard {}: {}", shard, what));
}

// One to one where ranks agree; else the layout's dimensions in order, as many as multiply up to each extent.
Result<std::vector<std::vector<std::size_t>>> default_axes(const Shard& shard, std::size_t number) {
  std::vector<std::vector<std::size_t>> axes(shard.extent.size());
  const Dims& dims = shard.layout.dims();
  if (dims.size() == axes.size()) {
    for (std::size_t i = 0; i < axes.size(); ++i) axes[i] = {i};
    return axes;
  }
  std::size_t next = 0;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    std::int64_t product = 1;
    while (next < dims.size() &&
           (axes[i].empty() ||
            (dims[next] > 0 && product < shard.extent[i] && product <= INT64_MAX / dims[next]) ||
            dims[next] == 1)) {
      product *= dims[next];
      axes[i].push_back(next++);
    }
  }
  if (next == dims.size()) return axes;
  return refuse(number,
                fmt::format("layout dimensions [{}] do not follow from the extents [{}]; name the axes",
                            fmt::join(dims, ","), fmt::join(shard.extent, ",")));
}

Status check_range(const Shard& shard, const ShardSpec& spec, std::size_t number, std::size_t dim) {
  const std::int64_t origin = shard.origin[dim], extent = shard.extent[dim], step = shard.step[dim],
                     size = spec.dims[dim];
  const bool inside =
      origin >= 0 && extent >= 0 && step >= 1 && step <= kDimMax &&
      (extent == 0 ? origin <= size : origin < size && extent - 1 <= (size - 1 - origin) / step);
  if (inside) return {};
  return refuse(number, fmt::format("{} indices from {} by {} of dimension {} of size {}", extent, origin,
                                    step, dim, size));
}

Status check_axes(const Shard& shard, std::size_t number) {
  const Dims& dims = shard.layout.dims();
  std::vector<bool> used(dims.size());
  for (std::size_t dim = 0; dim < shard.axes.size(); ++dim) {
    std::int64_t product = 1;
    for (const std::size_t axis : shard.axes[dim]) {
      if (axis >= dims.size() || used[axis])
        return refuse(number, fmt::format("axis {} of dimension {} is not free", axis, dim));
      used[axis] = true;
      if (__builtin_mul_overflow(product, dims[axis], &product)) return refuse(number, "axes too large");
    }
    const bool padded = shard.axes[dim].size() == 1 && product >= shard.extent[dim];
    if (!padded && product != shard.extent[dim]) {
      return refuse(number, fmt::format("axes of {} elements for {} indices of dimension {}", product,
                                        shard.extent[dim], dim));
    }
  }
  for (std::size_t axis = 0; axis < dims.size(); ++axis) {
    if (!used[axis])
      return refuse(number, fmt::format("layout dimension {} belongs to no global dimension", axis));
  }
  return {};
}

}  // namespace

Status complete(ShardSpec& spec) {
  for (const std::int64_t dim : spec.dims) {
    if (dim < 0 || dim > kDimMax)
      return base::fail(Code::kInvalid, fmt::format("a global dimension of {}", dim));
  }
  for (std::size_t number = 0; number < spec.shards.size(); ++number) {
    Shard& shard = spec.shards[number];
    if (shard.step.empty()) shard.step.assign(spec.dims.size(), 1);
    if (shard.origin.size() != spec.dims.size() || shard.extent.size() != spec.dims.size() ||
        shard.step.size() != spec.dims.size()) {
      return refuse(number, fmt::format("origin, extent and step must have rank {}", spec.dims.size()));
    }
    if (shard.layout.dtype() != spec.dtype) {
      return refuse(number,
                    fmt::format("dtype {} in an array of {}", shard.layout.dtype().name, spec.dtype.name));
    }
    for (std::size_t dim = 0; dim < spec.dims.size(); ++dim)
      TPUSYNC_TRY(check_range(shard, spec, number, dim));
    if (shard.axes.empty()) {
      auto axes = default_axes(shard, number);
      if (!axes) return tl::unexpected(std::move(axes).error());
      shard.axes = *std::move(axes);
    }
    if (shard.axes.size() != spec.dims.size()) return refuse(number, "axes must name every global dimension");
    TPUSYNC_TRY(check_axes(shard, number));
  }
  return {};
}

Result<AxisMap> axis_of(const Shard& shard, std::size_t dim) {
  AxisMap out;
  for (const std::size_t axis : shard.axes[dim]) {
    const AxisMap& minor = shard.layout.axis(axis);
    if (axis == shard.axes[dim].front()) {
      out = minor;
      continue;
    }
    auto both = joined(out, minor, static_cast<std::uint64_t>(shard.layout.dims()[axis]));
    if (!both) return both;
    out = *std::move(both);
  }
  return out;
}

}  // namespace tpusync::layout
