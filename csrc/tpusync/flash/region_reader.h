// A read-only view of one region, whoever writes it: peers read pages with it, tools check it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "tpusync/base/error.h"
#include "tpusync/flash/page_buffer.h"
#include "tpusync/flash/slot_format.h"
#include "tpusync/os/file.h"

namespace tpusync::flash {

using RecordBytes = std::array<std::byte, kRecordBytes>;

// A resource. Thread-safe. Takes no lock, writes nothing, and keeps nothing that it has read: every answer is
// what the files say during the call. The table is read, not mapped: a writer's records are in the page
// cache, so this costs a system call and no disk access, and a file that is cut short meanwhile reads short
// instead of raising a signal. A writer that was stopped or killed at any moment leaves at worst misses.
class RegionReader {
 public:
  struct Options {
    std::string base_path;  // without suffix: <directory>/region-000
    bool direct = true;     // of slots
    // What the namespace is, if the caller knows it: a table whose header is damaged can be read then.
    std::optional<Digest> name_space{};
  };

  // kNotFound: no table or no slots. kCorrupt: no header holds, and what it said is not known otherwise.
  // kUnsupported: a newer version. kInvalid: of another namespace than the one expected. kIo.
  static base::Result<std::unique_ptr<RegionReader>> open(os::FileSystem& files, const Options& options);

  RegionReader(const RegionReader&) = delete;
  RegionReader& operator=(const RegionReader&) = delete;

  const TableHeader& header() const { return header_; }
  // The header above was put together from records, because the one in the file does not hold.
  bool header_damaged() const { return header_damaged_; }
  // Slots that the slot file has room for now, and records that the table has room for now.
  base::Result<std::uint32_t> num_slots() const;
  base::Result<std::uint32_t> num_records() const;

  enum class Kind : unsigned char { kFree, kHolds, kDamaged };
  struct Seen {
    Kind kind = Kind::kFree;
    SlotRecord record;  // of kHolds
    RecordBytes bytes{};
  };
  // Calls `visit` for the records [first, first + num) that are there and say something. Answers how many
  // records there were. A record that is being written may be seen torn, hence kDamaged: look again.
  base::Result<std::uint32_t> scan(index::SlotId first, std::uint32_t num,
                                   const std::function<void(index::SlotId, const Seen&)>& visit) const;
  // One record as it is now; kFree behind the end of the table.
  base::Result<Seen> look(index::SlotId slot) const;

  // Reads the page of `key` from `slot`. kOk: the buffer holds what was put under this key. kNotFound: the
  // slot does not hold this key, or did not until the end of the read. kCorrupt: it does, and the bytes are
  // not those that were written. kIo. The buffer was made for `slots()`.
  base::Status read(index::SlotId slot, const index::PageKey& key, PageBuffer& buffer) const;
  const os::File& slots() const { return *slots_; }

  // False once the files were removed or replaced: whoever keeps them open then keeps their space, too.
  bool is_current() const;

 private:
  RegionReader(os::FileSystem& files, const Options& options, std::unique_ptr<os::File> table,
               std::unique_ptr<os::File> slots);
  base::Status find_header();
  base::Status guess_header();
  Seen decode(index::SlotId slot, std::span<const std::byte, kRecordBytes> bytes) const;
  base::Result<std::uint32_t> count(const os::File& file, std::uint64_t begin, std::uint64_t step) const;

  os::FileSystem& files_;
  const Options options_;
  const std::unique_ptr<os::File> table_;
  const std::unique_ptr<os::File> slots_;
  TableHeader header_;
  bool header_damaged_ = false;
  std::uint64_t seed_ = 0;
};

// What the table's file says of itself; nothing where it does not hold. For tools, which show what they can.
struct TableHead {
  std::optional<TableHeader> header;
  std::optional<WriterMark> writer;
};
base::Result<TableHead> read_table_head(const os::File& table);

}  // namespace tpusync::flash
