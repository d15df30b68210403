// How many entries a region has, and which prefixes they belong to.
#pragma once

#include <cstdint>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/flash/region_reader.h"

namespace tpusync::flash {

// A value: the pages of a region that hang together, named by the first of them that is there.
struct PrefixTree {
  index::PageKey root;
  std::uint16_t root_depth = 0;         // pages before the root, which are not in this region; 0 for a head
  std::uint32_t num_pages = 0;          // of all that continue the root, itself among them
  std::uint32_t num_pages_longest = 0;  // of the longest path below the root
};

struct RegionSummary {
  std::uint32_t num_slots = 0;
  std::uint32_t num_entries = 0;
  std::uint32_t num_damaged = 0;  // records; beside a writer, some may only be half written
  std::uint32_t num_trees = 0;
  std::int64_t oldest_unix_ns = 0;  // when the entry was written that was written first; 0: there is none
  std::int64_t newest_unix_ns = 0;  // and last
  std::vector<PrefixTree> largest;  // trees, most pages first
};

// Reads the table, and needs about 80 bytes per entry while it runs.
base::Result<RegionSummary> summarize(const RegionReader& reader, std::size_t num_trees_max);

}  // namespace tpusync::flash
