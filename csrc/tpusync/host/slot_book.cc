#include "tpusync/host/slot_book.h"

#include <algorithm>
#include <cassert>

namespace tpusync::host {

using index::kNoSlot;
using index::SlotId;

namespace {
bool always(SlotId) {
  return true;
}
}  // namespace

SlotBook::SlotBook(std::uint32_t num_slots)
    : num_slots_(num_slots), warm_(index::make_lru_order()), waiting_(index::make_lru_order()) {
  slots_.grow_to(num_slots);
  blank_position_.grow_to(num_slots);
  warm_->grow_to(num_slots);
  waiting_->grow_to(num_slots);
  blank_.reserve(num_slots);
  // Backwards, so that a new pool is filled from its first slot on.
  for (std::uint32_t i = num_slots; i-- > 0;) enter(SlotId{i});
}

SlotBook::Place SlotBook::place_of(const Slot& s) {
  if (s.used) return Place::kUsed;
  if (!s.sealed) return Place::kBlank;
  if (s.num_firm > 0) return Place::kFirm;
  return s.num_soft > 0 ? Place::kWaiting : Place::kWarm;
}

void SlotBook::enter(SlotId slot) {
  Slot& s = slots_[slot];
  s.place = place_of(s);
  switch (s.place) {
    case Place::kUsed:
      ++num_used_;
      break;
    case Place::kBlank:
      blank_position_[slot] = static_cast<std::uint32_t>(blank_.size());
      blank_.push_back(slot);
      break;
    case Place::kWarm:
      warm_->insert(slot, 0, kNoSlot, true);
      ++num_warm_;
      break;
    case Place::kWaiting:
      waiting_->insert(slot, 0, kNoSlot, true);
      ++num_waiting_;
      break;
    case Place::kFirm:
      break;
  }
}

void SlotBook::leave(SlotId slot) {
  switch (slots_[slot].place) {
    case Place::kUsed:
      --num_used_;
      break;
    case Place::kBlank: {
      const std::uint32_t position = blank_position_[slot];
      blank_[position] = blank_.back();
      blank_position_[blank_[position]] = position;
      blank_.pop_back();
      break;
    }
    case Place::kWarm:
      warm_->erase(slot, 0);
      --num_warm_;
      break;
    case Place::kWaiting:
      waiting_->erase(slot, 0);
      --num_waiting_;
      break;
    case Place::kFirm:
      break;
  }
}

SlotId SlotBook::next() const {
  if (!blank_.empty()) return blank_.back();
  return num_warm_ > 0 ? warm_->victim(always) : num_waiting_ > 0 ? waiting_->victim(always) : kNoSlot;
}

SlotId SlotBook::take() {
  const SlotId slot = next();
  if (slot == kNoSlot) return slot;
  leave(slot);
  Slot& s = slots_[slot];
  num_sealed_ -= s.sealed ? 1 : 0;
  s = Slot{.last_touch = s.last_touch, .use = s.use + 1, .used = true};
  enter(slot);
  return slot;
}

void SlotBook::give_back(SlotId slot) {
  assert(slots_[slot].used);
  leave(slot);
  slots_[slot].used = false;
  // A seal that is being computed belongs to a use that is over; a page that is sealed stays the same page.
  if (!slots_[slot].sealed) ++slots_[slot].use;
  slots_[slot].last_touch = ++num_touches_;
  enter(slot);
}

void SlotBook::clear() {
  std::vector<SlotId> used;
  for (std::uint32_t i = 0; i < num_slots_; ++i) {
    if (slots_[SlotId{i}].used) used.push_back(SlotId{i});
  }
  std::sort(used.begin(), used.end(),
            [this](SlotId a, SlotId b) { return slots_[a].last_touch < slots_[b].last_touch; });
  for (const SlotId slot : used) give_back(slot);
}

void SlotBook::seal(SlotId slot) {
  Slot& s = slots_[slot];
  assert(s.used && !s.sealed);
  s.sealed = true;
  ++num_sealed_;
  touch(slot);
}

void SlotBook::unseal(SlotId slot) {
  Slot& s = slots_[slot];
  assert(s.sealed);
  leave(slot);
  s.sealed = false;
  s.num_soft = s.num_firm = 0;
  ++s.use;
  --num_sealed_;
  enter(slot);
}

void SlotBook::touch(SlotId slot) {
  Slot& s = slots_[slot];
  s.last_touch = ++num_touches_;
  if (s.place == Place::kWarm) warm_->touch(slot);
}

Pin SlotBook::pin(SlotId slot, PinKind kind) {
  Slot& s = slots_[slot];
  assert(s.sealed);
  ++(kind == PinKind::kFirm ? s.num_firm : s.num_soft);
  if (s.place != place_of(s)) move(slot);
  return {slot, s.use, kind};
}

void SlotBook::unpin(const Pin& pin) {
  Slot& s = slots_[pin.slot];
  if (s.use != pin.use) return;
  std::uint32_t& count = pin.kind == PinKind::kFirm ? s.num_firm : s.num_soft;
  assert(count > 0);
  --count;
  if (s.place != place_of(s)) move(pin.slot);
}

void SlotBook::recover(std::span<const SlotId> sealed) {
  for (const SlotId slot : sealed) {
    assert(!slots_[slot].used && !slots_[slot].sealed);
    leave(slot);
    slots_[slot].sealed = true;
    slots_[slot].last_touch = ++num_touches_;
    ++num_sealed_;
    enter(slot);
  }
}

std::vector<SlotId> SlotBook::oldest(std::size_t limit) const {
  std::vector<SlotId> slots;
  const auto collect = [&](SlotId slot) {
    if (slots.size() < limit) slots.push_back(slot);
    return slots.size() >= limit;  // "may evict" ends the walk
  };
  if (limit > 0) warm_->victim(collect);
  if (slots.size() < limit) waiting_->victim(collect);
  return slots;
}

bool SlotBook::consistent() const {
  std::uint32_t num_used = 0, num_sealed = 0, num_blank = 0, num_warm = 0, num_waiting = 0;
  for (std::uint32_t i = 0; i < num_slots_; ++i) {
    const Slot& s = slots_[SlotId{i}];
    num_used += s.used;
    num_sealed += s.sealed;
    num_blank += s.place == Place::kBlank;
    num_warm += s.place == Place::kWarm;
    num_waiting += s.place == Place::kWaiting;
    if (s.place != place_of(s)) return false;
    if (s.place == Place::kBlank && blank_[blank_position_[SlotId{i}]] != SlotId{i}) return false;
  }
  std::uint32_t num_listed = 0;
  warm_->for_each([&](SlotId slot) { num_listed += slots_[slot].place == Place::kWarm; });
  waiting_->for_each([&](SlotId slot) { num_listed += slots_[slot].place == Place::kWaiting; });
  return num_used == num_used_ && num_sealed == num_sealed_ && num_blank == blank_.size() &&
         num_warm == num_warm_ && num_waiting == num_waiting_ && num_listed == num_warm + num_waiting;
}

}  // namespace tpusync::host
