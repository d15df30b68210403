#include "tpusync/layout/axis_map.h"

#include <fmt/format.h>

#include <numeric>

namespace tpusync::layout {

using base::Code;
using base::Result;

namespace {

constexpr std::uint64_t kPeriodMax = std::uint64_t{1} << 22;

tl::unexpected<base::Error> too_late() {
  return base::fail(Code::kUnsupported,
                    fmt::format("a dimension that repeats after more than {} elements", kPeriodMax));
}

}  // namespace

// (i / n, i % n) lies at major(i / n) + minor(i % n).
Result<AxisMap> joined(const AxisMap& major, const AxisMap& minor, std::uint64_t minor_size) {
  if (minor_size == 0 || minor_size > kPeriodMax / major.period()) return too_late();
  AxisMap out{.stride = major.stride, .within = {}};
  out.within.reserve(major.period() * minor_size);
  for (std::uint64_t i = 0; i < major.period() * minor_size; ++i)
    out.within.push_back(major(i / minor_size) + minor(i % minor_size));
  return out;
}

Result<AxisMap> every(const AxisMap& map, std::uint64_t first, std::uint64_t step) {
  const std::uint64_t period = map.period() / std::gcd(map.period(), step);
  if (period > kPeriodMax) return too_late();
  AxisMap out{.stride = map(first + period * step) - map(first), .within = {}};
  for (std::uint64_t i = 0; i < period; ++i) out.within.push_back(map(first + i * step));
  return out;
}

}  // namespace tpusync::layout
