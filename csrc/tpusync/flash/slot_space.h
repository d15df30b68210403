// The slots of the own region: which are free, which hold what, who reads them now, and when there are more.
//
//             acquire               publish
//   free ----------------> writing ----------> present
//     ^        release        |                  |  evict, remove, drop: no longer found
//     |<----------------------'                  v
//     |<------------------------------------- leaving (until the last pin is gone)
//
// A slot's record is cleared on disk before its payload is written anew: at no moment does a record describe
// bytes that are on their way out or in.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "tpusync/base/clock.h"
#include "tpusync/base/error.h"
#include "tpusync/flash/counters.h"
#include "tpusync/flash/node.h"
#include "tpusync/flash/region.h"
#include "tpusync/index/prefix_index.h"

namespace tpusync::flash {

// An entry that cannot be overwritten while it is pinned; give each one back with unpin().
struct PinnedSlot {
  index::SlotId slot = index::kNoSlot;
  std::uint64_t generation = 0;
  std::uint64_t payload_checksum = 0;
};

// A resource. Thread-safe. No lock is held during IO on slots or records.
class SlotSpace {
 public:
  SlotSpace(Node& node, std::unique_ptr<Region> region, const base::Clock& clock, Counters& counters,
            std::uint32_t extent_slots, std::optional<std::chrono::seconds> ttl);

  // Reads the table. Call once, before anything else.
  base::Status recover();

  // ---- lookups, microseconds
  std::size_t match(std::span<const index::PageKey> keys, std::span<const index::PageKey> prefix);
  bool present(const index::PageKey& key);
  std::vector<bool> contains(std::span<const index::PageKey> keys);
  // One per key; slot kNoSlot for a miss. Touches what it finds, and the prefix.
  std::vector<PinnedSlot> pin(std::span<const index::PageKey> keys, std::span<const index::PageKey> prefix);
  void unpin(index::SlotId slot);
  void touch(std::span<const index::PageKey> keys, std::span<const index::PageKey> prefix);
  std::vector<index::PageKey> keys();

  // ---- writing pages
  // Sorted slots for the first of `keys`, which continue each other. Where a slot would cost an entry that is
  // worth more than the page, the page and those after it are declined and counted. Why others have none:
  // kExhausted, no slot can be had; kIo, a record could not be cleared.
  struct Acquired {
    std::vector<index::SlotId> slots;
    std::size_t num_declined = 0;
    base::Code rest = base::Code::kOk;
  };
  Acquired acquire(std::span<const index::PageKey> keys);
  void release(index::SlotId slot);
  // A number higher than that of every page written so far.
  std::uint64_t next_generation();
  // Changes with clear(): what was written for an earlier one must not be published.
  std::uint64_t clear_count();
  // Writes the records of slots that lie side by side, then makes their entries visible. One code per record:
  // kOk, visible, or stored by somebody else meanwhile; kCancelled, cleared meanwhile; kExhausted, the slot
  // is being given back; or why the records could not be written. A slot without an entry is free again.
  std::vector<base::Code> publish(index::SlotId first, std::span<const SlotRecord> records,
                                  std::uint64_t clear_count);

  // ---- dropping entries
  void drop(index::SlotId slot, std::uint64_t generation);  // pinned by the caller
  std::size_t remove(std::span<const index::PageKey> keys);
  std::size_t clear();

  // Gives back what the node asks for, and what has outlived its time. Call now and then.
  void housekeep();

  Region& region() { return *region_; }
  struct Gauges {
    std::uint64_t entries = 0;
    std::uint64_t slots = 0;
    std::uint64_t recovered_entries = 0;
    double recovery_ms = 0;
  };
  Gauges gauges();
  bool consistent();  // for tests: walks the index and the free list

 private:
  enum class State : unsigned char { kFree, kWriting, kPresent, kLeaving };
  struct Slot {
    std::uint64_t generation = 0;
    std::uint64_t payload_checksum = 0;
    std::uint32_t num_pins = 0;
    State state = State::kFree;
    bool has_record = false;  // on disk: to be cleared before the slot is written
  };
  static_assert(sizeof(Slot) == 24);

  std::vector<index::SlotId> take_slots(std::span<const index::PageKey> keys, Acquired& acquired);
  // Pages that have outlived their time are not found; they leave, and are for clear_and_free().
  std::vector<index::SlotId> find_locked(std::span<const index::PageKey> keys,
                                         std::vector<index::SlotId>& outlived);
  std::uint64_t oldest_generation() const;
  void sweep();
  void grow_arrays(std::uint32_t num_slots);
  base::Status grow();
  base::Code insert_locked(index::SlotId slot, const SlotRecord& record, std::uint64_t clear_count);
  base::Status clear_records_of(std::span<const index::SlotId> adjacent);
  void free_locked(index::SlotId slot);
  void leave_locked(index::SlotId slot);
  std::size_t clear_and_free(std::vector<index::SlotId> slots);
  void shrink_to(std::uint32_t num_slots);

  Node& node_;
  const std::unique_ptr<Region> region_;
  const base::Clock& clock_;
  Counters& counters_;
  const std::uint32_t extent_slots_;
  const std::optional<std::chrono::seconds> ttl_;

  std::mutex resize_mutex_;  // held by the one thread that changes the files' size; before mutex_
  std::mutex mutex_;         // guards all below
  index::PrefixIndex index_;
  index::SlotArray<Slot> slots_;
  std::vector<index::SlotId> free_;
  std::uint32_t num_slots_ = 0;
  std::uint32_t limit_ = 0;  // slots from here on are to be given back
  std::uint64_t generation_ = 0;
  std::uint64_t clear_count_ = 0;
  std::uint32_t next_sweep_ = 0;  // the slot that sweep() goes on with
  std::chrono::steady_clock::time_point next_growth_{};
  std::uint64_t recovered_entries_ = 0;
  double recovery_ms_ = 0;
};

}  // namespace tpusync::flash
