#include "tpusync/index/prefix_index.h"

#include <algorithm>
#include <cassert>

namespace tpusync::index {

namespace {
constexpr std::size_t kNumBucketsMin = 1024;
// More ancestors than this are not looked for when a caller names none.
constexpr int kNumAncestorsMax = 4096;
}  // namespace

PrefixIndex::PrefixIndex(std::unique_ptr<EvictOrder> order)
    : order_(std::move(order)), buckets_(kNumBucketsMin, kNoSlot) {}

void PrefixIndex::grow_to(std::size_t num_slots) {
  entries_.grow_to(num_slots);
  order_->grow_to(num_slots);
}

std::size_t PrefixIndex::bucket_of(std::uint64_t short_hash) const {
  // Keys of a damaged or hostile source need not be uniform: mix.
  return ((short_hash * 0x9e3779b97f4a7c15ull) >> 20) & (buckets_.size() - 1);
}

SlotId PrefixIndex::find(const PageKey& key) const {
  SlotId slot = buckets_[bucket_of(key.short_hash())];
  while (slot != kNoSlot && entries_[slot].key != key) slot = entries_[slot].chain;
  return slot;
}

SlotId PrefixIndex::find_parent(std::uint64_t parent) const {
  if (parent == 0) return kNoSlot;
  SlotId slot = buckets_[bucket_of(parent)];
  while (slot != kNoSlot && entries_[slot].key.short_hash() != parent) slot = entries_[slot].chain;
  return slot;
}

// ---------------------------------------------------------------- who has children

void PrefixIndex::add_child(std::uint64_t parent) {
  if (parent == 0) return;
  const SlotId slot = find_parent(parent);
  if (slot == kNoSlot) {
    ++orphans_[parent];
  } else if (entries_[slot].num_children++ == 0 && entries_[slot].ordered) {
    order_->set_leaf(slot, false);
  }
}

void PrefixIndex::remove_child(std::uint64_t parent) {
  if (parent == 0) return;
  if (const SlotId slot = find_parent(parent); slot != kNoSlot) {
    if (entries_[slot].num_children > 0 && --entries_[slot].num_children == 0) order_->set_leaf(slot, true);
  } else if (const auto at = orphans_.find(parent); at != orphans_.end() && --at->second == 0) {
    orphans_.erase(at);
  }
}

std::uint32_t PrefixIndex::take_orphans(const PageKey& key) {
  const auto at = orphans_.find(key.short_hash());
  if (at == orphans_.end()) return 0;
  const std::uint32_t num_children = at->second;
  orphans_.erase(at);
  return num_children;
}

void PrefixIndex::add_to_table(SlotId slot, const PageKey& key, Ancestry ancestry) {
  if (size_ >= buckets_.size()) rehash(buckets_.size() * 2);
  SlotId& head = buckets_[bucket_of(key.short_hash())];
  Entry& entry = entries_[slot];
  entry.key = key;
  entry.parent = ancestry.parent & PageKey::kShortHashMask;
  entry.depth = ancestry.depth;
  entry.chain = head;
  entry.num_children = take_orphans(key);
  entry.used = true;
  entry.ordered = false;
  head = slot;
  ++size_;
}

void PrefixIndex::insert(SlotId slot, const PageKey& key, Ancestry ancestry) {
  assert(!entries_[slot].used);
  add_to_table(slot, key, ancestry);
  Entry& entry = entries_[slot];
  const SlotId parent = find_parent(entry.parent);
  add_child(entry.parent);
  order_->insert(slot, key.short_hash(), parent == slot ? kNoSlot : parent, entry.num_children == 0);
  entry.ordered = true;
}

SlotId PrefixIndex::victim(const std::function<bool(SlotId)>& may_evict) {
  const SlotId slot = order_->victim([&](SlotId at) { return at != deepest_touched_ && may_evict(at); });
  return slot != kNoSlot && entries_[slot].num_children == 0 ? slot : order_->victim(may_evict);
}

void PrefixIndex::erase(SlotId slot) {
  Entry& entry = entries_[slot];
  assert(entry.used);
  SlotId* link = &buckets_[bucket_of(entry.key.short_hash())];
  while (*link != slot) link = &entries_[*link].chain;
  *link = entry.chain;
  order_->erase(slot, entry.key.short_hash());
  entry.used = false;
  --size_;
  if (entry.num_children > 0) orphans_[entry.key.short_hash()] += entry.num_children;
  remove_child(entry.parent);
}

void PrefixIndex::rehash(std::size_t num_buckets) {
  std::vector<SlotId> old(num_buckets, kNoSlot);
  old.swap(buckets_);
  for (SlotId head : old) {
    while (head != kNoSlot) {
      Entry& entry = entries_[head];
      const SlotId next = entry.chain;
      SlotId& place = buckets_[bucket_of(entry.key.short_hash())];
      entry.chain = place;
      place = head;
      head = next;
    }
  }
}

std::vector<SlotId> PrefixIndex::find_all(std::span<const PageKey> keys) const {
  std::vector<SlotId> slots(keys.size());
  for (const PageKey& key : keys) __builtin_prefetch(&buckets_[bucket_of(key.short_hash())]);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    slots[i] = buckets_[bucket_of(keys[i].short_hash())];
    if (slots[i] != kNoSlot) __builtin_prefetch(&entries_[slots[i]]);
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    while (slots[i] != kNoSlot && entries_[slots[i]].key != keys[i]) slots[i] = entries_[slots[i]].chain;
  }
  return slots;
}

void PrefixIndex::touch(std::span<const SlotId> slots) {
  for (std::size_t i = slots.size(); i-- > 0;) {
    if (slots[i] == kNoSlot) continue;
    if (deepest_touched_ == kNoSlot) deepest_touched_ = slots[i];
    order_->touch(slots[i]);
  }
}

void PrefixIndex::touch_path(std::span<const PageKey> prefix, std::span<const PageKey> keys) {
  touch_path(prefix, find_all(keys));
}

void PrefixIndex::touch_path(std::span<const PageKey> prefix, std::span<const SlotId> slots) {
  order_->begin_request();
  deepest_touched_ = kNoSlot;
  touch(slots);
  touch(find_all(prefix));
  if (!prefix.empty() || slots.empty()) return;
  SlotId slot = slots.front();
  for (int i = 0; slot != kNoSlot && i < kNumAncestorsMax; ++i) {
    slot = find_parent(entries_[slot].parent);
    if (slot != kNoSlot) order_->touch(slot);
  }
}

std::vector<PageKey> PrefixIndex::keys() const {
  std::vector<PageKey> keys;
  keys.reserve(size_);
  order_->for_each([&](SlotId slot) { keys.push_back(entries_[slot].key); });
  return keys;
}

std::vector<SlotId> PrefixIndex::rebuild(std::span<const SlotId> slots,
                                         const std::function<Recovered(SlotId)>& entry_of) {
  assert(size_ == 0);
  std::size_t num_buckets = kNumBucketsMin;
  while (num_buckets < slots.size()) num_buckets *= 2;
  rehash(num_buckets);
  std::vector<SlotId> duplicates;
  for (SlotId slot : slots) {
    const Recovered entry = entry_of(slot);
    if (find(entry.key) == kNoSlot) {
      add_to_table(slot, entry.key, entry.ancestry);
    } else {
      duplicates.push_back(slot);
    }
  }
  const auto of_entry = [&](SlotId slot) { return entries_[slot].used; };
  for (SlotId slot : slots)
    if (of_entry(slot)) add_child(entries_[slot].parent);
  std::vector<SlotId> path;
  for (SlotId slot : slots) {
    if (!of_entry(slot)) continue;
    for (SlotId at = slot; at != kNoSlot && !entries_[at].ordered; at = find_parent(entries_[at].parent)) {
      entries_[at].ordered = true;
      path.push_back(at);
    }
    for (; !path.empty(); path.pop_back())
      order_->append(path.back(), entries_[path.back()].num_children == 0);
  }
  return duplicates;
}

bool PrefixIndex::consistent() const {
  std::size_t num_in_table = 0;
  std::unordered_map<std::uint64_t, std::uint32_t> num_children;  // by parent
  for (SlotId head : buckets_) {
    for (SlotId slot = head; slot != kNoSlot; slot = entries_[slot].chain) {
      if (!entries_[slot].used || find(entries_[slot].key) != slot) return false;
      if (++num_in_table > size_) return false;
      if (entries_[slot].parent != 0) ++num_children[entries_[slot].parent];
    }
  }
  for (const auto& [parent, count] : num_children) {
    const SlotId slot = find_parent(parent);
    const auto orphans = orphans_.find(parent);
    if (slot == kNoSlot && (orphans == orphans_.end() || orphans->second != count)) return false;
    if (slot != kNoSlot && (orphans != orphans_.end() || entries_[slot].num_children != count)) return false;
  }
  std::size_t num_ordered = 0;
  order_->for_each([&](SlotId slot) { num_ordered += entries_[slot].used; });
  return num_in_table == size_ && num_ordered == size_ && order_->consistent();
}

}  // namespace tpusync::index
