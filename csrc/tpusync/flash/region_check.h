// Compares everything that a region says with what it holds, in steps, beside its writer if there is one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/flash/region_reader.h"

namespace tpusync::flash {

// A value: one damage that was there at two looks, some time apart.
struct Finding {
  enum class Kind : unsigned char {
    kRecord,      // the record does not hold
    kPayload,     // the slot does not hold what its record says
    kUnreadable,  // the system cannot read the slot
    kHeader,      // the header of the table does not hold
    kShortTable,  // the table has fewer records than the slot file has slots
  };
  Kind kind = Kind::kRecord;
  std::uint32_t slot = 0;  // of the first three; of kShortTable, the number of records
  RecordBytes record{};    // of the first three: what was damaged, to be recognized by drop_entries()
  std::string text;        // for people
};

// A resource. Confined to one thread at a time.
class RegionCheck {
 public:
  static base::Result<std::unique_ptr<RegionCheck>> open(os::FileSystem& files,
                                                         const RegionReader::Options& options);
  RegionCheck(const RegionCheck&) = delete;
  RegionCheck& operator=(const RegionCheck&) = delete;

  // Goes on until about `num_bytes` of payload were read; false once all is done. What a writer changed
  // meanwhile is no damage. An error: the table cannot be read any more.
  base::Result<bool> step(std::uint64_t num_bytes);

  struct Progress {
    std::uint32_t num_slots = 0;  // to look at; may change while a writer grows or shrinks the region
    std::uint32_t num_looked_at = 0;
    std::uint64_t num_intact = 0;
    std::uint64_t num_moved = 0;  // changed while they were read
    std::uint64_t num_bytes = 0;  // of payload
  };
  const Progress& progress() const { return progress_; }
  const std::vector<Finding>& findings() const { return findings_; }  // complete once step() answered false
  const RegionReader& reader() const { return *reader_; }

 private:
  explicit RegionCheck(std::unique_ptr<RegionReader> reader);
  struct Entry {
    index::SlotId slot;
    RegionReader::Seen seen;
  };
  base::Result<bool> load_entries();
  base::Status check_entry(const Entry& entry);
  base::Status check_page(const Entry& entry, bool is_last_look);
  base::Status confirm();
  base::Status check_sizes();
  void add(Finding::Kind kind, const Entry& entry, std::string text);

  const std::unique_ptr<RegionReader> reader_;
  BufferPool buffers_;
  os::AlignedBuffer memory_;
  Progress progress_;
  std::vector<Entry> entries_;  // of the stretch of the table that is being looked at
  std::size_t next_ = 0;
  std::vector<Entry> suspects_;
  std::vector<Finding> findings_;
};

}  // namespace tpusync::flash
