#include "tpusync/os/memory_limits.h"

#include <fmt/format.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <sstream>

#include "tpusync/base/bytes.h"

namespace tpusync::os {

using base::Code;
using base::Result;

namespace {

// cgroup v1 writes "no limit" as a huge page-rounded number.
constexpr std::uint64_t kUnlimitedMin = std::uint64_t{1} << 60;

std::optional<std::string> read_all(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::optional<std::uint64_t> number_in(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t\n");
  if (first == std::string_view::npos) return std::nullopt;
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data() + first, text.data() + text.size(), value);
  if (error != std::errc() || end == text.data() + first) return std::nullopt;
  return value;
}

// The number behind `name` at the start of a line of "name value" or "name: value" lines.
std::optional<std::uint64_t> field_of(const std::string& text, std::string_view name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.size() > name.size() && line.starts_with(name) &&
        (line[name.size()] == ' ' || line[name.size()] == ':')) {
      return number_in(std::string_view(line).substr(name.size() + 1));
    }
  }
  return std::nullopt;
}

struct CgroupFiles {
  std::string directory;  // where the memory controller is mounted
  std::string limit;
  std::string used;
  std::string droppable;  // name in memory.stat
};

std::uint64_t room(std::uint64_t limit, std::uint64_t used) {
  return limit - std::min(limit, used);
}

void tighten(MemoryLimits& limits, const CgroupFiles& names, const std::string& group) {
  const std::string directory = names.directory + group + "/";
  const std::optional<std::string> limit_text = read_all(directory + names.limit);
  const std::optional<std::uint64_t> limit = limit_text ? number_in(*limit_text) : std::nullopt;
  if (!limit || *limit >= kUnlimitedMin) return;
  const std::uint64_t used = number_in(read_all(directory + names.used).value_or("")).value_or(0);
  const std::uint64_t droppable =
      field_of(read_all(directory + "memory.stat").value_or(""), names.droppable).value_or(0);
  const std::uint64_t kept = room(used, droppable);
  if (limits.cgroup_limit_bytes &&
      room(*limits.cgroup_limit_bytes, limits.cgroup_used_bytes) <= room(*limit, kept)) {
    return;
  }
  limits.cgroup_limit_bytes = *limit;
  limits.cgroup_used_bytes = kept;
}

// Looks at the group of one line of /proc/self/cgroup, "id:controllers:path", and at all groups above it.
void look_at(MemoryLimits& limits, const std::string& line, const MemoryRoots& roots) {
  const std::size_t first = line.find(':');
  const std::size_t second = line.find(':', first + 1);
  if (first == std::string::npos || second == std::string::npos) return;
  const std::string controllers = line.substr(first + 1, second - first - 1);
  CgroupFiles names;
  if (controllers.empty()) {
    names = {roots.cgroup, "memory.max", "memory.current", "inactive_file"};
  } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
    names = {roots.cgroup + "/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
             "total_inactive_file"};
  } else {
    return;
  }
  std::string group = line.substr(second + 1);
  while (true) {
    tighten(limits, names, group == "/" ? "" : group);
    const std::size_t slash = group.rfind('/');
    if (group.empty() || group == "/" || slash == std::string::npos) return;
    group.resize(slash);
  }
}

}  // namespace

Result<MemoryLimits> memory_limits(const std::string& directory, const MemoryRoots& roots) {
  MemoryLimits limits;
  const std::optional<std::string> memory = read_all(roots.proc + "/meminfo");
  const std::optional<std::uint64_t> available = memory ? field_of(*memory, "MemAvailable") : std::nullopt;
  if (!available) return base::fail(Code::kIo, fmt::format("{}/meminfo names no MemAvailable", roots.proc));
  limits.host_available_bytes = *available * base::kKiB;
  std::istringstream groups(read_all(roots.proc + "/self/cgroup").value_or(""));
  for (std::string line; std::getline(groups, line);) look_at(limits, line, roots);
  struct statvfs space;
  if (::statvfs(directory.c_str(), &space) != 0)
    return base::fail_errno(fmt::format("stat {}", directory), errno);
  limits.file_system_total_bytes = std::uint64_t{space.f_blocks} * space.f_frsize;
  limits.file_system_available_bytes = std::uint64_t{space.f_bavail} * space.f_frsize;
  return limits;
}

}  // namespace tpusync::os
