// One node's store directory: what all its processes share. Capacity, floor and write budget are totals of
// the directory; what is used is counted from the files themselves, so no count can drift.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tpusync/base/clock.h"
#include "tpusync/base/error.h"
#include "tpusync/flash/counters.h"
#include "tpusync/flash/ledger.h"
#include "tpusync/flash/options.h"
#include "tpusync/flash/region.h"
#include "tpusync/flash/store_path.h"
#include "tpusync/os/file.h"

namespace tpusync::flash {

// A resource. Thread-safe.
class Node {
 public:
  static base::Result<std::unique_ptr<Node>> open(os::FileSystem& files, const base::Clock& clock,
                                                  const FlashOptions& options, Counters& counters);

  // Takes the lowest region of the namespace that no other process has, made new if all are taken.
  base::Result<std::unique_ptr<Region>> adopt_region(const FlashOptions& options, bool direct);

  // How far a region of `own_slots` slots may grow now: whole slots that capacity and floor allow, at most
  // `num_wanted`. A region below its share first takes space from regions without a process, then asks the
  // others for it. `grow` is called with the number while the directory is locked; not at all for 0, which is
  // kExhausted.
  base::Status grow(const Region& region, std::uint32_t own_slots, std::uint32_t num_wanted,
                    const std::function<base::Status(std::uint32_t num_more)>& grow);

  // Slots that this region should give back now: to a region that has less than its share, or because the
  // directory holds more than its capacity, or others leave less free than the floor. At most `num_extent` at
  // a time, except for the capacity.
  std::uint32_t slots_to_give_back(const Region& region, std::uint32_t own_slots, std::uint32_t num_extent);

  // Takes bytes out of the day's budget; answers how many, 0 when it is spent.
  std::uint64_t lease_budget(std::uint64_t bytes);
  void return_budget(std::uint64_t bytes);
  std::uint64_t budget_left_bytes() const;

  std::uint64_t capacity_bytes() const { return capacity_bytes_; }
  std::uint64_t floor_bytes() const { return floor_bytes_; }
  std::uint64_t budget_bytes_per_day() const { return budget_bytes_per_day_; }
  base::Result<std::uint64_t> used_bytes() const;  // what du says of <path>/v1

 private:
  struct RegionFiles {
    std::string base_path;  // without suffix
    std::uint64_t disk_bytes = 0;
    std::int64_t modified_unix_ns = 0;
  };
  struct Usage {
    std::uint64_t total_bytes = 0;
    std::uint64_t region_bytes = 0;
    std::uint32_t num_live = 0;
    std::vector<RegionFiles> dead;  // oldest first
  };
  class Lock;

  Node(os::FileSystem& files, const base::Clock& clock, const FlashOptions& options, Counters& counters);
  base::Status choose_limits(const FlashOptions& options);
  base::Status write_identity(const FlashOptions& options);
  base::Result<Usage> usage() const;
  void add_regions(const std::string& directory, Usage& usage) const;
  base::Result<std::uint64_t> room_bytes(const Usage& usage) const;
  std::uint64_t allowed_bytes(std::uint64_t total_bytes) const;
  std::uint64_t share_bytes(const Usage& usage, std::uint64_t allowed_bytes) const;
  bool reclaim(const RegionFiles& region);
  void set_want(bool wanted);
  Ledger read_ledger(const os::File& file, bool& reset) const;
  template <typename Change>
  void change_ledger(Change change);

  os::FileSystem& files_;
  const base::Clock& clock_;
  Counters& counters_;
  const StorePath path_;
  std::uint64_t capacity_bytes_ = 0;
  std::uint64_t floor_bytes_ = 0;
  std::uint64_t budget_bytes_per_day_ = 0;
  std::mutex mutex_;  // the directory's lock among the threads of this process
  std::unique_ptr<os::File> lock_file_;
};

}  // namespace tpusync::flash
