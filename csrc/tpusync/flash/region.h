// The two files of one region: slots and their table. Knows where bytes go, not which are worth keeping.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "tpusync/base/error.h"
#include "tpusync/flash/slot_format.h"
#include "tpusync/os/file.h"

namespace tpusync::flash {

inline constexpr std::string_view kTableSuffix = ".table";
inline constexpr std::string_view kSlotsSuffix = ".slots";
std::string region_name(int number);  // region-000

// A resource: holds the region's lock until it goes. Thread-safe, except that resize() excludes itself and
// that callers keep slots beyond the end alone.
class Region {
 public:
  struct Options {
    std::string directory;  // exists
    int number = 0;
    Digest name_space{};
    std::uint64_t page_bytes = 0;
    bool direct = true;
    std::uint32_t process_id = 0;
    std::int64_t now_unix_ns = 0;
  };

  // Opens the region, made new if it is missing. kBusy with the writer's process when it is locked; kInvalid
  // when it belongs to another namespace or page size; kUnsupported when it is of a newer version (and
  // untouched).
  static base::Result<std::unique_ptr<Region>> open(os::FileSystem& files, const Options& options);

  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // Reads the whole table. Calls `found` for every slot whose record holds; answers how many were damaged.
  // Reads the header, too, and repairs it from what the caller knows if it is damaged.
  base::Result<std::uint64_t> recover(const std::function<void(index::SlotId, const SlotRecord&)>& found);

  // Of slots that lie side by side.
  base::Status write_records(index::SlotId first, std::span<const SlotRecord> records);
  base::Status clear_records(index::SlotId first, std::uint32_t num_records);
  base::Status resize(std::uint32_t num_slots);  // either way; new slots are free
  // Payloads first: a record that is on the medium then describes bytes that are, too.
  base::Status sync_slots();
  base::Status sync_table();

  std::string path() const { return options_.directory + "/" + name(); }
  std::string name() const { return region_name(options_.number); }
  std::uint32_t num_slots() const { return num_slots_; }
  std::uint64_t slot_bytes() const { return slot_bytes_; }
  std::uint64_t slot_offset(index::SlotId slot) const { return index::to_number(slot) * slot_bytes_; }
  os::File& slots() const { return *slots_; }
  // The space that `num_slots` more would take, a little too much rather than too little.
  std::uint64_t disk_bytes_of(std::uint64_t num_slots) const;

 private:
  Region(const Options& options, std::unique_ptr<os::File> table, std::unique_ptr<os::File> slots);
  base::Status check_header();

  const Options options_;
  const std::uint64_t slot_bytes_;
  const std::uint64_t seed_;
  std::unique_ptr<os::File> table_;
  std::unique_ptr<os::File> slots_;
  std::uint32_t num_slots_ = 0;
  bool header_damaged_ = false;
};

}  // namespace tpusync::flash
