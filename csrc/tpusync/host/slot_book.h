// Which slots of a pool are in use, and in which order the others are reused. Memory of this process only.
//
//   blank --take--> used --give_back--> blank                 (not sealed)
//                     `---give_back--> warm, waiting, firm    (sealed: still readable until it is taken)
//
// take() prefers blank slots, then warm ones in eviction order, then waiting ones: those that somebody pinned
// softly, the oldest pin first. Firmly pinned slots are not taken.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "tpusync/index/evict_order.h"
#include "tpusync/index/slot_array.h"

namespace tpusync::host {

enum class PinKind : unsigned char { kSoft, kFirm };

// A promise that a slot keeps its page, until unpin(); a soft one ends when the slot is taken. A value.
struct Pin {
  index::SlotId slot = index::kNoSlot;
  std::uint32_t use = 0;  // which use of the slot it is about
  PinKind kind = PinKind::kSoft;
};

// One use of a slot, from its alloc to its free: what began in one use must not end in another. A value.
struct SlotUse {
  index::SlotId slot = index::kNoSlot;
  std::uint32_t use = 0;
};

// Thread-compatible. Everything is O(1) but clear() and constructors. About 48 bytes per slot.
class SlotBook {
 public:
  explicit SlotBook(std::uint32_t num_slots);

  std::uint32_t num_slots() const { return num_slots_; }
  std::uint32_t num_available() const { return num_blank() + num_warm_ + num_waiting_; }
  std::uint32_t num_blank() const { return static_cast<std::uint32_t>(blank_.size()); }
  std::uint32_t num_used() const { return num_used_; }
  std::uint32_t num_sealed() const { return num_sealed_; }

  bool used(index::SlotId slot) const { return slots_[slot].used; }
  bool sealed(index::SlotId slot) const { return slots_[slot].sealed; }
  // Counts the uses of a slot: whoever works on a slot outside the lock compares it afterwards.
  std::uint32_t use(index::SlotId slot) const { return slots_[slot].use; }

  // The slot that take() would return, kNoSlot if there is none.
  index::SlotId next() const;
  // That slot, now used and not sealed.
  index::SlotId take();
  void give_back(index::SlotId slot);
  // Gives back all that is used, the least recently touched first in eviction order.
  void clear();

  void seal(index::SlotId slot);
  void unseal(index::SlotId slot);  // a warm, waiting or firm slot becomes blank
  // Marks as the most recently used. Touch descendants before their ancestors.
  void touch(index::SlotId slot);

  Pin pin(index::SlotId slot, PinKind kind);  // of a sealed slot
  void unpin(const Pin& pin);
  bool holds(const Pin& pin) const { return slots_[pin.slot].use == pin.use; }

  // For a book that knows no page yet: `sealed` slots are not used, the one to evict first comes first.
  void recover(std::span<const index::SlotId> sealed);

  // The warm and waiting slots that would be taken first, at most `limit` of them.
  std::vector<index::SlotId> oldest(std::size_t limit) const;

  // Walks everything and answers whether all invariants hold. For tests.
  bool consistent() const;

 private:
  enum class Place : unsigned char { kUsed, kBlank, kWarm, kWaiting, kFirm };
  struct Slot {
    std::uint64_t last_touch = 0;
    std::uint32_t use = 0;
    std::uint32_t num_soft = 0;
    std::uint32_t num_firm = 0;
    Place place = Place::kBlank;
    bool used = false;
    bool sealed = false;
  };

  static Place place_of(const Slot& slot);  // the one that its marks ask for
  void enter(index::SlotId slot);
  void leave(index::SlotId slot);
  void move(index::SlotId slot) {
    leave(slot);
    enter(slot);
  }

  const std::uint32_t num_slots_;
  index::SlotArray<Slot> slots_;
  std::vector<index::SlotId> blank_;
  index::SlotArray<std::uint32_t> blank_position_;
  std::unique_ptr<index::EvictOrder> warm_;
  std::unique_ptr<index::EvictOrder> waiting_;
  std::uint32_t num_warm_ = 0;
  std::uint32_t num_waiting_ = 0;
  std::uint32_t num_used_ = 0;
  std::uint32_t num_sealed_ = 0;
  std::uint64_t num_touches_ = 0;
};

}  // namespace tpusync::host
