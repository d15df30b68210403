// Evicts the leaf that is worth least by ReuseModel, out of a sample of the leaves.
//
// An entry knows its last use and how often it was used; a bounded number of ghosts know the same of pages
// that are not stored, so that a page which comes back is no stranger and the model sees what eviction cost.
// A hand goes round over entries and ghosts, some per use: what it meets tells the model how many pages there
// are of each kind and age. Time is counted in uses of the store, so that the order is a function of the
// calls alone.
#pragma once

#include "tpusync/base/prng.h"
#include "tpusync/index/evict_order.h"
#include "tpusync/index/ghost_table.h"
#include "tpusync/index/reuse_model.h"
#include "tpusync/index/slot_array.h"

namespace tpusync::index {

// Thread-compatible. 12 bytes per slot and 1 to 2 for ghosts, of which there are at least kNumGhostsMin.
class ReuseOrder final : public EvictOrder {
 public:
  static constexpr std::size_t kNumGhostsMin = 65536;

  ReuseOrder() { ghosts_.reserve(kNumGhostsMin); }

  void grow_to(std::size_t num_slots) override;
  void insert(SlotId slot, std::uint64_t key_hash, SlotId parent, bool is_leaf) override;
  void append(SlotId slot, bool is_leaf) override;
  void begin_request() override { model_.begin_request(); }
  void touch(SlotId slot) override;
  void erase(SlotId slot, std::uint64_t key_hash) override;
  void set_leaf(SlotId slot, bool is_leaf) override;
  SlotId victim(const std::function<bool(SlotId)>& may_evict) override;
  bool admit(std::uint64_t key_hash, SlotId victim) override;
  void for_each(const std::function<void(SlotId)>& visit) const override;
  bool consistent() const override;

 private:
  struct Entry {
    std::uint32_t last_use = 0;
    std::uint8_t num_uses = 0;  // 0: the slot is free
    bool is_leaf = false;
    bool is_listed = false;  // in leaves_, perhaps longer than it is a leaf
  };
  static_assert(sizeof(Entry) == 8);

  std::uint8_t count_use(std::uint32_t last_use, std::uint32_t num_uses);
  // Uses of a page within 1/64 of the store are one use: a request looks it up, reads it and names it as the
  // prefix of what it stores.
  bool is_same_use(std::uint32_t last_use) const { return now_ - last_use <= num_slots_ / 64; }
  float worth_of(const Entry& entry) const;
  std::uint32_t sample(std::uint32_t num_seen);
  void meet(std::uint32_t last_use, std::uint32_t num_uses);
  void pass_time();
  SlotId any_entry(const std::function<bool(SlotId)>& may_evict) const;
  SlotId& leaf_at(std::uint32_t i) { return leaves_[SlotId{i}]; }
  void unlist(std::uint32_t i);

  SlotArray<Entry> entries_;
  SlotArray<SlotId> leaves_;  // in no order, the latest last; some are none any more
  std::uint32_t num_leaves_ = 0;
  std::uint32_t num_slots_ = 0;
  GhostTable ghosts_;
  ReuseModel model_;
  base::Prng prng_{1};
  std::uint32_t now_ = 0;  // ages are differences: that it runs over does no harm
  std::uint32_t num_appended_ = 0;
  std::size_t hand_ = 0;
};

}  // namespace tpusync::index
