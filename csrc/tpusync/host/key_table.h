// From keys to the slots that may hold them, in a region's shared memory: a hash table with chains. What a
// reader finds is a hint that the seal record confirms; a reader beside a writer may miss an entry, and never
// hangs.
#pragma once

#include <atomic>
#include <cstdint>

#include "tpusync/index/page_key.h"

namespace tpusync::host {

// A view of memory that outlives it. find(): thread-safe, beside one writer. The rest: confined to the
// writer's lock.
class KeyTable {
 public:
  // `num_buckets` is a power of two. Both arrays hold slot + 1, 0 for none.
  KeyTable(std::uint32_t* chain, std::uint64_t num_slots, std::uint32_t* buckets, std::uint64_t num_buckets)
      : chain_(chain), num_slots_(num_slots), buckets_(buckets), num_buckets_(num_buckets) {}

  // The first slot of the chain of `short_hash` for which `is_it(slot)` says true; kNoSlot if there is none.
  template <typename IsIt>
  index::SlotId find(std::uint64_t short_hash, const IsIt& is_it) const {
    std::uint32_t at = load(buckets_ + bucket_of(short_hash));
    // The bound ends a walk through a table that is damaged, or changes faster than it is walked.
    for (int i = 0; i < kNumStepsMax && at != 0 && at <= num_slots_; ++i) {
      const index::SlotId slot{at - 1};
      if (is_it(slot)) return slot;
      at = load(chain_ + (at - 1));
    }
    return index::kNoSlot;
  }

  void clear();
  void insert(std::uint64_t short_hash, index::SlotId slot);
  void erase(std::uint64_t short_hash, index::SlotId slot);

 private:
  static constexpr int kNumStepsMax = 256;

  static std::uint32_t load(const std::uint32_t* word) {
    // acquire: the seal of a slot that is found is at least as new as the entry.
    return std::atomic_ref(*const_cast<std::uint32_t*>(word)).load(std::memory_order_acquire);
  }
  static void store(std::uint32_t* word, std::uint32_t value) {
    std::atomic_ref(*word).store(value, std::memory_order_release);
  }
  std::uint64_t bucket_of(std::uint64_t short_hash) const {
    return ((short_hash * 0x9e3779b97f4a7c15ull) >> 24) & (num_buckets_ - 1);
  }

  std::uint32_t* chain_;
  std::uint64_t num_slots_;
  std::uint32_t* buckets_;
  std::uint64_t num_buckets_;
};

}  // namespace tpusync::host
