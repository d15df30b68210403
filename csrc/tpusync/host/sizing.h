// Whether a region fits into the memory of this host, with the arithmetic for people.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tpusync/base/error.h"
#include "tpusync/host/region_format.h"
#include "tpusync/os/memory_limits.h"

namespace tpusync::host {

struct SizingInput {
  Geometry geometry;
  std::uint64_t table_bytes = 0;                          // beside the pages
  std::uint64_t present_bytes = 0;                        // what an adopted region has already
  std::uint64_t reserve_bytes = 0;                        // left to others
  std::optional<std::uint64_t> cap_bytes = std::nullopt;  // of all regions of the node
  std::uint64_t regions_bytes = 0;  // what all regions of the node have, the adopted one with them
  os::MemoryLimits limits;
};

struct Sizing {
  std::uint64_t needed_bytes = 0;     // beyond what is present
  std::uint64_t available_bytes = 0;  // the tightest limit
  std::string arithmetic;             // one line
  std::uint64_t missing_bytes() const {
    return needed_bytes > available_bytes ? needed_bytes - available_bytes : 0;
  }
};

Sizing size_up(const SizingInput& input);

std::string human_bytes(std::uint64_t bytes);  // "8.00 GiB"

}  // namespace tpusync::host
