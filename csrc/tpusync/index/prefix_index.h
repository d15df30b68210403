// Which page is in which slot, and in which order entries are evicted. Metadata only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "tpusync/index/evict_order.h"
#include "tpusync/index/page_key.h"
#include "tpusync/index/slot_array.h"

namespace tpusync::index {

// The place of a page in its prefix, as the slot table keeps it.
struct Ancestry {
  std::uint64_t parent = 0;  // PageKey::short_hash of the page before; 0 for the head of a prefix
  std::uint16_t depth = 0;   // pages before it, at most 65535
};

// Thread-compatible. Costs 48 bytes per slot, what the order takes, and 4 to 8 per entry for the hash table.
class PrefixIndex {
 public:
  explicit PrefixIndex(std::unique_ptr<EvictOrder> order);

  // Slots below `num_slots` may be used from now on.
  void grow_to(std::size_t num_slots);

  std::size_t size() const { return size_; }
  SlotId find(const PageKey& key) const;  // kNoSlot: a miss
  const PageKey& key_at(SlotId slot) const { return entries_[slot].key; }
  bool occupied(SlotId slot) const { return entries_[slot].used; }

  // `key` must not be stored and `slot` must be free.
  void insert(SlotId slot, const PageKey& key, Ancestry ancestry);
  void erase(SlotId slot);

  // One slot per key. The way to look up many: the memory of all is fetched at the same time.
  std::vector<SlotId> find_all(std::span<const PageKey> keys) const;

  // Marks a path as used, its deepest page first and its head last, so that ancestors stay the younger ones.
  // `prefix` are the pages before `keys`; without it ancestors are found through the parents that are known.
  void touch_path(std::span<const PageKey> prefix, std::span<const PageKey> keys);
  // The same for pages that were found already; kNoSlot among them is skipped.
  void touch_path(std::span<const PageKey> prefix, std::span<const SlotId> slots);

  // The entry to evict next. The deepest page of the path that was touched last stays if another one can go:
  // it may be the parent of the page that room is made for.
  SlotId victim(const std::function<bool(SlotId)>& may_evict);
  // Whether a page that is offered and not stored is worth the place of `victim`. If not, or if that is
  // kNoSlot, the order remembers that the page was seen.
  bool admit(const PageKey& key, SlotId victim) { return order_->admit(key.short_hash(), victim); }
  std::vector<PageKey> keys() const;  // the most recently used first

  // Fills an empty index. `slots` are sorted by last write, newest first; key and ancestry of each are asked
  // for. Entries get that order, except that each entry's ancestors come before it. Duplicate keys: the first
  // stays, the others are returned.
  struct Recovered {
    PageKey key;
    Ancestry ancestry;
  };
  std::vector<SlotId> rebuild(std::span<const SlotId> slots,
                              const std::function<Recovered(SlotId)>& entry_of);

  // Walks everything and answers whether all invariants hold. For tests.
  bool consistent() const;

 private:
  struct Entry {
    PageKey key;
    std::uint64_t parent : 48;
    std::uint64_t depth : 16;
    SlotId chain;  // next entry of the same bucket
    std::uint32_t num_children : 30;
    std::uint32_t used : 1;
    std::uint32_t ordered : 1;
  };
  static_assert(sizeof(Entry) == 48);

  std::size_t bucket_of(std::uint64_t short_hash) const;
  SlotId find_parent(std::uint64_t parent) const;
  void add_child(std::uint64_t parent);
  void remove_child(std::uint64_t parent);
  std::uint32_t take_orphans(const PageKey& key);
  void add_to_table(SlotId slot, const PageKey& key, Ancestry ancestry);
  void rehash(std::size_t num_buckets);
  void touch(std::span<const SlotId> slots);

  std::unique_ptr<EvictOrder> order_;
  SlotArray<Entry> entries_;
  std::vector<SlotId> buckets_;
  // Stored children of pages that are not: a child may be written before its parent, or outlive it.
  std::unordered_map<std::uint64_t, std::uint32_t> orphans_;
  std::size_t size_ = 0;
  SlotId deepest_touched_ = kNoSlot;
};

}  // namespace tpusync::index
