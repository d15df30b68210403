// A pool of host DRAM whose pages outlive their use, and their process: SGLang's host pool is one of these.
//
//   alloc --> (somebody writes the page) --> seal --> free: still readable --> alloc: gone
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/host/region_file.h"
#include "tpusync/host/slot_book.h"
#include "tpusync/metrics/metrics.h"

namespace tpusync::host {

// A page of the caller's memory, in as many pieces as the geometry has.
using ConstPieces = std::span<const std::byte* const>;
using Pieces = std::span<std::byte* const>;

// When a read of the own region sums up what it has copied. kOnce: the first time that this process reads a
// page which an earlier process sealed. What this process has sealed or verified itself is not summed up
// again: only it writes to the region, and it unseals a slot before its bytes change. kAlways: at every read.
enum class Verify : unsigned char { kOnce, kAlways };

// A resource: the one writer of its file. Thread-safe. The file and its pages stay when it goes.
class Region {
 public:
  // `file` was made by RegionFile::create or adopt. Adoption looks at every record, not at the pages: those
  // that were there before are verified when they are first read.
  static base::Result<std::unique_ptr<Region>> open(std::unique_ptr<RegionFile> file);

  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  const Geometry& geometry() const { return file_->geometry(); }
  // [piece][slot][bytes of a piece], the memory of the pool, mapped for as long as the region lives.
  std::span<std::byte> payload() const { return file_->payload(); }
  const RegionFile& file() const { return *file_; }
  std::span<std::byte> piece(index::SlotId slot, std::size_t number) const {
    return file_->piece(slot, number);
  }

  // Slots for `count` pages, or none at all. What was sealed in them is gone when this returns. O(count).
  std::vector<index::SlotId> alloc(std::size_t count);
  // kInvalid, and nothing is freed, if one of them is not in use. Pages that are sealed stay readable.
  // `slots` are in prefix order: the first is evicted last.
  base::Status free(std::span<const index::SlotId> slots);
  std::size_t num_available() const;
  // Frees everything that is in use, in the order of its last touch.
  void free_all();

  // Declares that each slot, which is in use, holds the whole page of its key from now on until it is
  // allocated again. `keys` continue `prefix`; sums up the bytes on the calling thread. One outcome per page:
  // kOk, also if the page is sealed in another slot that is in use; kInvalid: not in use; kCancelled: freed
  // meanwhile.
  std::vector<base::Code> seal(std::span<const index::PageKey> prefix, std::span<const index::PageKey> keys,
                               std::span<const index::SlotId> slots);

  // For bytes that arrive while others run: call it before the first one does. What was sealed in the slots
  // is gone when this returns. kInvalid, and nothing has changed: a slot is not in use, or named twice.
  base::Result<std::vector<SlotUse>> begin_write(std::span<const index::SlotId> slots);
  // Seals what has arrived in a use that begin_write() told, the bytes summed up here. kCancelled: that use
  // is over, whoever has the slot now.
  base::Code seal_bytes(const index::PageKey& key, index::Ancestry ancestry, SlotUse use);
  // The same for bytes that the caller has summed up under payload_seed().
  base::Code seal_known(const index::PageKey& key, index::Ancestry ancestry, SlotUse use,
                        std::uint64_t payload_checksum);

  std::size_t match(std::span<const index::PageKey> keys) const;
  bool contains(const index::PageKey& key) const;
  void touch(std::span<const index::PageKey> prefix, std::span<const index::PageKey> keys);

  struct Found {
    index::SlotId slot = index::kNoSlot;
    Seal seal;
  };
  std::optional<Found> find(const index::PageKey& key) const;

  // Copies a page out. kNotFound: not here, or allocated meanwhile; kCorrupt: its bytes are not what was
  // sealed, and it has been dropped. Otherwise the checksum of the page.
  base::Result<Seal> get(const index::PageKey& key, Pieces to, Verify verify = Verify::kOnce);

  // Whether the page is here and its bytes are those that were sealed; drops it if not.
  bool verify(const index::PageKey& key);

  // Keeps pages from being evicted. Nothing for a key that is not here.
  std::optional<Pin> pin(const index::PageKey& key, PinKind kind);
  void unpin(const Pin& pin);

  std::size_t remove(std::span<const index::PageKey> keys);
  std::size_t clear();  // drops every page; slots in use stay in use
  std::vector<index::PageKey> keys() const;
  // The pages that will be evicted first.
  std::vector<index::PageKey> oldest(std::size_t limit) const;

  // The ancestors of a page that are here, head first, as far up as they are known without a gap.
  std::vector<index::PageKey> path_of(const index::PageKey& key) const;

  std::uint64_t seed() const { return seals_.seed(); }
  std::vector<metrics::Sample> samples() const;
  // Walks everything and answers whether all invariants hold. For tests.
  bool consistent() const;

 private:
  explicit Region(std::unique_ptr<RegionFile> file);
  void recover();
  index::SlotId find_locked(const index::PageKey& key) const;
  index::SlotId parent_of(index::SlotId slot) const;
  void drop_locked(index::SlotId slot);
  void retract_locked(index::SlotId slot);
  void touch_ancestors_locked(index::SlotId slot);
  base::Code seal_slot(const index::PageKey& key, index::Ancestry ancestry, index::SlotId slot);
  bool in_use_locked(index::SlotId slot) const;
  bool current_locked(SlotUse use) const;
  enum class Check : unsigned char { kNone, kRight, kWrong };
  base::Result<Seal> finish_read(const Found& found, Check check);
  std::uint64_t checksum_of(const index::PageKey& key, index::SlotId slot) const;

  const std::unique_ptr<RegionFile> file_;
  mutable std::mutex mutex_;  // over the records, too, as far as this process writes them
  SealTable seals_;
  KeyTable keys_;
  SlotBook book_;
  struct Mark {
    std::uint64_t short_hash = 0;  // under which keys_ has the slot, whatever becomes of its record
    bool verified = false;         // sealed or verified by this process
  };
  index::SlotArray<Mark> marks_;
  std::uint64_t next_generation_ = 0;

  struct Counters {
    metrics::Counter adopted, damaged_records, sealed, sealed_already, not_in_use, freed_while_sealing,
        evicted, hits, misses, verified, corrupt, overtaken;
  };
  mutable Counters counters_;
  std::jthread populate_;  // last: it uses the rest
};

// The ancestry of page `i` of keys that continue `prefix`.
index::Ancestry ancestry_of(std::span<const index::PageKey> prefix, std::span<const index::PageKey> keys,
                            std::size_t i);

}  // namespace tpusync::host
