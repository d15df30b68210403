// The order in which entries are evicted: the seam behind which policies compete.
#pragma once

#include <functional>
#include <memory>

#include "tpusync/index/page_key.h"

namespace tpusync::index {

// Thread-compatible. Knows slots only; PrefixIndex calls it and keeps this promise towards it: an ancestor is
// touched after its descendants, so that a policy by recency alone never evicts a page before its children.
class EvictOrder {
 public:
  virtual ~EvictOrder() = default;

  // Slots below `num_slots` may be used from now on.
  virtual void grow_to(std::size_t num_slots) = 0;
  // `parent` is the page before this one in its prefix, kNoSlot if that is not stored.
  virtual void insert(SlotId slot, SlotId parent) = 0;
  // Like insert, but as the entry to evict first: how an order is rebuilt, most recent entry first.
  virtual void append(SlotId slot) = 0;
  virtual void touch(SlotId slot) = 0;
  virtual void erase(SlotId slot) = 0;

  // The first entry in eviction order that `may_evict` allows, kNoSlot if it allows none. Does not erase it.
  virtual SlotId victim(const std::function<bool(SlotId)>& may_evict) const = 0;
  // Calls `visit` for every entry, the one evicted last first.
  virtual void for_each(const std::function<void(SlotId)>& visit) const = 0;
};

// Least recently used first.
std::unique_ptr<EvictOrder> make_lru_order();

}  // namespace tpusync::index
