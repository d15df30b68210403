#include "tpusync/index/evict_order.h"
#include "tpusync/index/slot_array.h"

namespace tpusync::index {

namespace {

// A doubly linked list over slot numbers, 8 bytes per slot. newest_ ... oldest_.
class LruOrder final : public EvictOrder {
 public:
  void grow_to(std::size_t num_slots) override { links_.grow_to(num_slots); }

  void insert(SlotId slot, std::uint64_t, SlotId parent, bool) override { link(slot, parent); }
  void append(SlotId slot, bool) override { link(slot, oldest_); }

  void touch(SlotId slot) override {
    if (slot == newest_) return;
    unlink(slot);
    link(slot, kNoSlot);
  }

  void erase(SlotId slot, std::uint64_t) override { unlink(slot); }

  SlotId victim(const std::function<bool(SlotId)>& may_evict) override {
    SlotId slot = oldest_;
    while (slot != kNoSlot && !may_evict(slot)) slot = links_[slot].newer;
    return slot;
  }

  void for_each(const std::function<void(SlotId)>& visit) const override {
    for (SlotId slot = newest_; slot != kNoSlot; slot = links_[slot].older) visit(slot);
  }

 private:
  struct Links {
    SlotId newer;
    SlotId older;
  };

  void unlink(SlotId slot) {
    const Links links = links_[slot];
    (links.newer == kNoSlot ? newest_ : links_[links.newer].older) = links.older;
    (links.older == kNoSlot ? oldest_ : links_[links.older].newer) = links.newer;
  }

  // Puts `slot` right behind `newer`, as the newest of all if that is kNoSlot. Behind its parent a new page
  // is older than all its ancestors and newer than everything that was older than they are.
  void link(SlotId slot, SlotId newer) {
    SlotId& place = newer == kNoSlot ? newest_ : links_[newer].older;
    const SlotId older = place;
    links_[slot] = {newer, older};
    place = slot;
    (older == kNoSlot ? oldest_ : links_[older].newer) = slot;
  }

  SlotArray<Links> links_;
  SlotId newest_ = kNoSlot;
  SlotId oldest_ = kNoSlot;
};

}  // namespace

std::unique_ptr<EvictOrder> make_lru_order() {
  return std::make_unique<LruOrder>();
}

}  // namespace tpusync::index
