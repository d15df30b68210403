// DRAM regions as tools see them: read-only, beside their writers, which never notice.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/host/region_file.h"
#include "tpusync/host/registry.h"

namespace tpusync::host {

// What one region's file says of itself. A value.
struct RegionView {
  Registry::Entry entry;
  bool has_writer = false;
  std::optional<WriterState> writer;  // who writes, or wrote last
  std::uint64_t page_bytes = 0;
  std::uint64_t num_slots = 0;
  std::uint64_t num_pages = 0;    // that are sealed
  std::uint64_t num_damaged = 0;  // records that say they are sealed and are not whole
  std::string trouble;            // why it cannot be read; all numbers are 0 then
};

// Every region under the registry's root, in the order of their names.
std::vector<RegionView> view_regions(const Registry& registry);

// The keys of the pages that one region holds at this moment. Errors as RegionFile::read.
base::Result<std::vector<index::PageKey>> keys_in(const Registry::Entry& entry);

// Compares the bytes of every sealed page with its seal, in steps. Thread-compatible.
class RegionCheck {
 public:
  // Errors as RegionFile::read.
  static base::Result<std::unique_ptr<RegionCheck>> open(const Registry::Entry& entry);

  struct Progress {
    std::uint64_t num_slots = 0;
    std::uint64_t num_looked_at = 0;
    std::uint64_t num_intact = 0;
    std::uint64_t num_moved = 0;  // allocated, or sealed anew, while they were read
    std::uint64_t num_bytes = 0;  // of pages, read
  };
  struct Finding {
    bool is_record = false;  // else its page
    index::SlotId slot = index::kNoSlot;
  };

  // Goes on until `num_bytes` more were read; false: that was all.
  bool step(std::uint64_t num_bytes);
  const Progress& progress() const { return progress_; }
  const std::vector<Finding>& findings() const { return findings_; }

 private:
  explicit RegionCheck(std::unique_ptr<RegionFile> file);
  void look_at(index::SlotId slot);

  const std::unique_ptr<RegionFile> file_;
  const SealTable seals_;
  Progress progress_;
  std::vector<Finding> findings_;
};

}  // namespace tpusync::host
