// How much a store may hold, leave free and write per day, where nobody said otherwise.
#pragma once

#include <cstdint>

#include "tpusync/base/error.h"
#include "tpusync/flash/options.h"
#include "tpusync/os/file.h"

namespace tpusync::flash {

// A value. Totals of a directory.
struct Limits {
  std::uint64_t capacity_bytes = 0;
  std::uint64_t floor_bytes = 0;
  std::uint64_t budget_bytes_per_day = 0;
};

// As configured; else 20 % of what is free with what the store holds already, at most 200 GB; 20 % of the
// file system; one capacity. kInvalid for a value that is more than the file system has.
base::Result<Limits> choose_limits(const FlashOptions& options, const os::SpaceInfo& space,
                                   std::uint64_t used_bytes);

}  // namespace tpusync::flash
