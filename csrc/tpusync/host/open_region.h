// How a process comes to its region: a dead one's of its namespace if that fits, else a new one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "tpusync/base/error.h"
#include "tpusync/host/region.h"
#include "tpusync/os/memory_limits.h"

namespace tpusync::host {

struct OpenOptions {
  std::string root;  // of the registry; absolute
  Digest name_space{};
  Geometry geometry;
  std::optional<std::uint64_t> cap_bytes =
      std::nullopt;  // of all regions under `root`; none: what the memory allows
  std::uint64_t reserve_bytes = std::uint64_t{1} << 30;  // left to others
  int numa_node = -1;                                    // -1: wherever
  int num_threads = 4;                                   // that make memory present
  os::MemoryRoots memory_roots{};

  // kInvalid with the first rule that is broken and its numbers.
  base::Status validate() const;
};

// kInvalid: an option; kExhausted: no room, with the arithmetic. Regions without a writer are removed when
// there is no room otherwise, those of other namespaces first. Says in the log which region it is and what it
// holds.
base::Result<std::unique_ptr<Region>> open_region(const OpenOptions& options);

}  // namespace tpusync::host
