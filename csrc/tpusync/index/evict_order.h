// The order in which entries are evicted: the seam behind which policies compete.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "tpusync/index/page_key.h"

namespace tpusync::index {

// Thread-compatible. Knows slots only; PrefixIndex calls it and keeps these promises towards it: an ancestor
// is touched after its descendants, and set_leaf() says which entries have no stored child, in whatever order
// pages come and go.
class EvictOrder {
 public:
  virtual ~EvictOrder() = default;

  // Slots below `num_slots` may be used from now on.
  virtual void grow_to(std::size_t num_slots) = 0;
  // The page whose PageKey::short_hash is `key_hash`. `parent` is the page before it in its prefix, kNoSlot
  // if that is not stored.
  virtual void insert(SlotId slot, std::uint64_t key_hash, SlotId parent, bool is_leaf) = 0;
  // Like insert, but as the entry to evict first: how an order is rebuilt, most recent entry first.
  virtual void append(SlotId slot, bool is_leaf) = 0;
  // What is touched and inserted from here on belongs to the next request.
  virtual void begin_request() {}
  virtual void touch(SlotId slot) = 0;
  virtual void erase(SlotId slot, std::uint64_t key_hash) = 0;
  virtual void set_leaf(SlotId /*slot*/, bool /*is_leaf*/) {}

  // The entry to evict next among those that `may_evict` allows, kNoSlot if it allows none. Does not erase
  // it.
  virtual SlotId victim(const std::function<bool(SlotId)>& may_evict) = 0;
  // Whether a page that is offered is worth the place of `victim`; kNoSlot: there is none. If not, that it
  // was seen is remembered.
  virtual bool admit(std::uint64_t /*key_hash*/, SlotId victim) { return victim != kNoSlot; }
  // Calls `visit` for every entry, the most recently used first.
  virtual void for_each(const std::function<void(SlotId)>& visit) const = 0;
  // Walks everything and answers whether all invariants hold. For tests.
  virtual bool consistent() const { return true; }
};

// What is least likely to be used soon first, leaves before their parents: reuse_order.h.
std::unique_ptr<EvictOrder> make_reuse_order();
// Least recently used first. To compare with.
std::unique_ptr<EvictOrder> make_lru_order();

}  // namespace tpusync::index
