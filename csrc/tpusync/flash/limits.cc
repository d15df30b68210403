#include "tpusync/flash/limits.h"

#include <fmt/format.h>

#include <algorithm>

namespace tpusync::flash {

namespace {
constexpr std::uint64_t kCapacityDefaultMax = 200'000'000'000;
constexpr std::uint64_t kDefaultFraction = 5;  // 20 %
}  // namespace

base::Result<Limits> choose_limits(const FlashOptions& options, const os::SpaceInfo& space,
                                   std::uint64_t used_bytes) {
  for (const auto& [name, value] :
       {std::pair{"capacity_bytes", options.capacity_bytes}, std::pair{"floor_bytes", options.floor_bytes}}) {
    if (!value || *value <= space.total_bytes) continue;
    return base::fail(base::Code::kInvalid,
                      fmt::format("{}: {} is more than the file system of {} has, {} bytes", name, *value,
                                  options.path, space.total_bytes));
  }
  const std::uint64_t available = space.available_bytes + used_bytes;
  Limits limits;
  limits.capacity_bytes =
      options.capacity_bytes.value_or(std::min(available / kDefaultFraction, kCapacityDefaultMax));
  limits.floor_bytes = options.floor_bytes.value_or(space.total_bytes / kDefaultFraction);
  limits.budget_bytes_per_day = options.write_budget_bytes_per_day.value_or(limits.capacity_bytes);
  return limits;
}

}  // namespace tpusync::flash
