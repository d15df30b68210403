// Changes to a store by somebody who writes no pages: for tools. Regions with a living writer are left alone,
// and so is everything of a newer version.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/flash/region_check.h"
#include "tpusync/flash/store_path.h"

namespace tpusync::flash {

// What is damaged in a region, and what its header should say if that is among it.
struct Repair {
  std::string base_path;  // <directory>/region-000
  std::span<const Finding> findings;
  TableHeader header;
};

// Clears the records of the findings where they still say what they said, gives a short table its length,
// writes a damaged header. Answers how many findings are settled. kBusy, with the process, while the region
// has a writer.
base::Result<std::size_t> repair_region(os::FileSystem& files, const StorePath& path, const Repair& repair,
                                        std::int64_t now_unix_ns);

// Removes the files of a region: every entry of it. kBusy as above; kUnsupported for a newer version.
base::Status remove_region(os::FileSystem& files, const StorePath& path, const std::string& base_path);

// Paths of what belongs to no region: temporary files, slots without a table, tables without slots,
// namespaces without a region. Removed as well, unless `dry_run`.
base::Result<std::vector<std::string>> remove_orphans(os::FileSystem& files, const StorePath& path,
                                                      bool dry_run);

}  // namespace tpusync::flash
