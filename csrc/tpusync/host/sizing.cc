#include "tpusync/host/sizing.h"

#include <fmt/format.h>

#include <algorithm>

#include "tpusync/base/bytes.h"

namespace tpusync::host {

namespace {

std::uint64_t less(std::uint64_t value, std::uint64_t taken) {
  return value - std::min(value, taken);
}

}  // namespace

std::string human_bytes(std::uint64_t bytes) {
  if (bytes >= base::kGiB) return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / base::kGiB);
  if (bytes >= base::kMiB) return fmt::format("{:.2f} MiB", static_cast<double>(bytes) / base::kMiB);
  return fmt::format("{} bytes", bytes);
}

Sizing size_up(const SizingInput& input) {
  Sizing sizing;
  const std::uint64_t total_bytes = input.geometry.payload_bytes() + input.table_bytes;
  sizing.needed_bytes = less(total_bytes, input.present_bytes);
  sizing.arithmetic = fmt::format("{} slots of {} + {} of tables = {}", input.geometry.num_slots,
                                  human_bytes(input.geometry.page_bytes()), human_bytes(input.table_bytes),
                                  human_bytes(total_bytes));
  if (input.present_bytes > 0)
    sizing.arithmetic += fmt::format(", {} of them present", human_bytes(input.present_bytes));
  sizing.arithmetic += fmt::format(", reserve {}", human_bytes(input.reserve_bytes));
  sizing.available_bytes = input.limits.file_system_available_bytes;
  sizing.arithmetic +=
      fmt::format("; file system {} free of {}", human_bytes(input.limits.file_system_available_bytes),
                  human_bytes(input.limits.file_system_total_bytes));
  const auto limit = [&](std::uint64_t bytes, std::string text) {
    sizing.available_bytes = std::min(sizing.available_bytes, bytes);
    sizing.arithmetic += "; " + text;
  };
  limit(less(input.limits.host_available_bytes, input.reserve_bytes),
        fmt::format("host {} available", human_bytes(input.limits.host_available_bytes)));
  if (input.limits.cgroup_limit_bytes) {
    limit(less(less(*input.limits.cgroup_limit_bytes, input.limits.cgroup_used_bytes), input.reserve_bytes),
          fmt::format("cgroup {} used of {}", human_bytes(input.limits.cgroup_used_bytes),
                      human_bytes(*input.limits.cgroup_limit_bytes)));
  }
  if (input.cap_bytes) {
    limit(less(*input.cap_bytes, input.regions_bytes),
          fmt::format("node cap {} of which {} used", human_bytes(*input.cap_bytes),
                      human_bytes(input.regions_bytes)));
  }
  sizing.arithmetic += fmt::format(": {} needed, {} available", human_bytes(sizing.needed_bytes),
                                   human_bytes(sizing.available_bytes));
  if (sizing.missing_bytes() > 0)
    sizing.arithmetic += fmt::format(", {} missing", human_bytes(sizing.missing_bytes()));
  return sizing;
}

}  // namespace tpusync::host
