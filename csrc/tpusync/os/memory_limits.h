// How much memory this process may still take: of the host, of its cgroup, and of a file system in memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tpusync/base/error.h"

namespace tpusync::os {

struct MemoryLimits {
  std::uint64_t host_available_bytes = 0;  // MemAvailable
  // Of the tightest one, this cgroup or one above; none: unlimited.
  std::optional<std::uint64_t> cgroup_limit_bytes = std::nullopt;
  std::uint64_t cgroup_used_bytes = 0;  // in the tightest one, without what the kernel can drop
  std::uint64_t file_system_total_bytes = 0;
  std::uint64_t file_system_available_bytes = 0;
};

// The root directories, so that a test can show others.
struct MemoryRoots {
  std::string proc = "/proc";
  std::string cgroup = "/sys/fs/cgroup";
};

// `directory` names the file system. kIo when /proc or the file system cannot be read; a cgroup that cannot
// be read counts as unlimited.
base::Result<MemoryLimits> memory_limits(const std::string& directory, const MemoryRoots& roots = {});

}  // namespace tpusync::os
