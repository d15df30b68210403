#include "tpusync/flash/slot_space.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <iterator>

#include "tpusync/base/log.h"

namespace tpusync::flash {

using base::Code;
using base::Result;
using base::Status;
using index::kNoSlot;
using index::PageKey;
using index::SlotId;
using index::to_number;

namespace {
// After a refusal: counting the directory for every page would only cost system calls.
constexpr std::chrono::milliseconds kGrowthRetry{1000};
// Slots that one call of housekeep() looks at for pages that have outlived their time.
constexpr std::uint32_t kSweepSlots = 65'536;

// Sorted slots as ranges [begin, end) that lie side by side.
template <typename Visit>
void for_each_range(std::span<const SlotId> slots, Visit visit) {
  for (std::size_t begin = 0, end = 0; begin < slots.size(); begin = end) {
    while (end < slots.size() && to_number(slots[end]) - to_number(slots[begin]) == end - begin) ++end;
    visit(slots.subspan(begin, end - begin));
  }
}

}  // namespace

SlotSpace::SlotSpace(Node& node, std::unique_ptr<Region> region, const base::Clock& clock, Counters& counters,
                     std::uint32_t extent_slots, std::optional<std::chrono::seconds> ttl)
    : node_(node),
      region_(std::move(region)),
      clock_(clock),
      counters_(counters),
      extent_slots_(extent_slots),
      ttl_(ttl),
      index_(index::make_reuse_order()) {}

void SlotSpace::grow_arrays(std::uint32_t num_slots) {
  index_.grow_to(num_slots);
  slots_.grow_to(num_slots);
  free_.reserve(free_.size() + (num_slots - num_slots_));
  // Handed out from the back: lowest number first, so that a batch tends to lie in one piece.
  std::vector<SlotId> added;
  for (std::uint32_t i = num_slots; i-- > num_slots_;) added.push_back(SlotId{i});
  free_.insert(free_.begin(), added.begin(), added.end());
  num_slots_ = limit_ = num_slots;
}

Status SlotSpace::recover() {
  const auto begin = std::chrono::steady_clock::now();
  std::lock_guard lock(mutex_);
  const std::uint32_t num_slots = region_->num_slots();
  index_.grow_to(num_slots);
  slots_.grow_to(num_slots);
  num_slots_ = limit_ = num_slots;
  index::SlotArray<index::PrefixIndex::Recovered> entries;
  entries.grow_to(num_slots);
  std::vector<SlotId> found;
  const auto num_damaged = region_->recover([&](SlotId slot, const SlotRecord& record) {
    slots_[slot] = {.generation = record.generation,
                    .payload_checksum = record.payload_checksum,
                    .state = State::kPresent,
                    .has_record = true};
    entries[slot] = {record.key, record.ancestry};
    found.push_back(slot);
    generation_ = std::max(generation_, record.generation);
  });
  if (!num_damaged) return tl::unexpected(num_damaged.error());
  std::sort(found.begin(), found.end(),
            [&](SlotId a, SlotId b) { return slots_[a].generation > slots_[b].generation; });
  for (SlotId slot : index_.rebuild(found, [&](SlotId s) { return entries[s]; })) {
    slots_[slot].state = State::kFree;
    // Else the older of two would come back once the newer one is gone.
    (void)region_->clear_records(slot, 1);
  }
  for (std::uint32_t i = num_slots; i-- > 0;) {
    Slot& slot = slots_[SlotId{i}];
    if (slot.state != State::kFree) continue;
    slot.has_record = true;  // damaged or doubled, perhaps: clear it before use
    free_.push_back(SlotId{i});
  }
  recovered_entries_ = index_.size();
  recovery_ms_ = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  if (*num_damaged > 0) {
    counters_.corrupt.add(*num_damaged);
    base::log(base::LogLevel::kWarning,
              fmt::format("{} damaged records in a slot table of {}; their pages are misses", *num_damaged,
                          num_slots));
  }
  return {};
}

// ---------------------------------------------------------------- lookups

// Generations below it have outlived their time.
std::uint64_t SlotSpace::oldest_generation() const {
  if (!ttl_) return 0;
  return generation_at(clock_.unix_ns() - std::chrono::nanoseconds(*ttl_).count());
}

std::vector<SlotId> SlotSpace::find_locked(std::span<const PageKey> keys, std::vector<SlotId>& outlived) {
  std::vector<SlotId> found = index_.find_all(keys);
  const std::uint64_t oldest = oldest_generation();
  if (oldest == 0) return found;
  for (SlotId& id : found) {
    if (id == kNoSlot || slots_[id].generation >= oldest) continue;
    if (slots_[id].state == State::kPresent) {
      leave_locked(id);
      ++slots_[id].num_pins;
      outlived.push_back(id);
    }
    id = kNoSlot;
  }
  counters_.outlived.add(outlived.size());
  return found;
}

void SlotSpace::sweep() {
  const std::uint64_t oldest = oldest_generation();
  if (oldest == 0) return;
  std::vector<SlotId> outlived;
  {
    std::lock_guard lock(mutex_);
    const std::uint32_t num_now = std::min(kSweepSlots, num_slots_);
    for (std::uint32_t i = 0; i < num_now; ++i, ++next_sweep_) {
      if (next_sweep_ >= num_slots_) next_sweep_ = 0;
      const SlotId id{next_sweep_};
      if (slots_[id].state != State::kPresent || slots_[id].generation >= oldest) continue;
      leave_locked(id);
      ++slots_[id].num_pins;
      outlived.push_back(id);
    }
  }
  counters_.outlived.add(outlived.size());
  clear_and_free(std::move(outlived));
}

std::size_t SlotSpace::match(std::span<const PageKey> keys, std::span<const PageKey> prefix) {
  std::vector<SlotId> outlived;
  std::size_t num_found = 0;
  {
    std::lock_guard lock(mutex_);
    const std::vector<SlotId> slots = find_locked(keys, outlived);
    const auto first_miss = std::find(slots.begin(), slots.end(), kNoSlot);
    index_.touch_path(prefix, std::span(slots.begin(), first_miss));
    num_found = static_cast<std::size_t>(first_miss - slots.begin());
  }
  clear_and_free(std::move(outlived));
  return num_found;
}

bool SlotSpace::present(const PageKey& key) {
  return contains(std::span(&key, 1)).front();
}

std::vector<bool> SlotSpace::contains(std::span<const PageKey> keys) {
  std::vector<SlotId> outlived;
  std::vector<bool> found(keys.size());
  {
    std::lock_guard lock(mutex_);
    const std::vector<SlotId> slots = find_locked(keys, outlived);
    for (std::size_t i = 0; i < keys.size(); ++i) found[i] = slots[i] != kNoSlot;
  }
  clear_and_free(std::move(outlived));
  return found;
}

std::vector<PinnedSlot> SlotSpace::pin(std::span<const PageKey> keys, std::span<const PageKey> prefix) {
  std::vector<SlotId> outlived;
  std::vector<PinnedSlot> pinned(keys.size());
  {
    std::lock_guard lock(mutex_);
    const std::vector<SlotId> found = find_locked(keys, outlived);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (found[i] == kNoSlot) continue;
      Slot& slot = slots_[found[i]];
      ++slot.num_pins;
      pinned[i] = {found[i], slot.generation, slot.payload_checksum};
    }
    index_.touch_path(prefix, found);
  }
  clear_and_free(std::move(outlived));
  return pinned;
}

void SlotSpace::unpin(SlotId id) {
  std::lock_guard lock(mutex_);
  Slot& slot = slots_[id];
  assert(slot.num_pins > 0);
  if (--slot.num_pins == 0 && slot.state == State::kLeaving) free_locked(id);
}

void SlotSpace::touch(std::span<const PageKey> keys, std::span<const PageKey> prefix) {
  std::lock_guard lock(mutex_);
  index_.touch_path(prefix, keys);
}

std::vector<PageKey> SlotSpace::keys() {
  std::lock_guard lock(mutex_);
  return index_.keys();
}

// ---------------------------------------------------------------- writing a page

void SlotSpace::free_locked(SlotId id) {
  slots_[id].state = State::kFree;
  if (to_number(id) < limit_) free_.push_back(id);
}

void SlotSpace::leave_locked(SlotId id) {
  index_.erase(id);
  slots_[id].state = State::kLeaving;
}

Status SlotSpace::clear_records_of(std::span<const SlotId> adjacent) {
  TPUSYNC_TRY(region_->clear_records(adjacent.front(), static_cast<std::uint32_t>(adjacent.size())));
  std::lock_guard lock(mutex_);
  for (const SlotId id : adjacent) slots_[id].has_record = false;
  return {};
}

std::vector<SlotId> SlotSpace::take_slots(std::span<const PageKey> keys, Acquired& acquired) {
  std::vector<SlotId> slots;
  std::unique_lock lock(mutex_);
  while (slots.size() < keys.size()) {
    acquired.rest = Code::kExhausted;
    // Again if others were faster: nothing is evicted while there is room to grow.
    while (free_.empty() && limit_ == num_slots_ && clock_.now() >= next_growth_) {
      lock.unlock();
      const Status grown = grow();
      lock.lock();
      if (!grown) acquired.rest = grown.error().code;
      if (!grown) break;
    }
    SlotId id = kNoSlot;
    if (!free_.empty()) {
      id = free_.back();
      free_.pop_back();
    } else {
      id = index_.victim([this](SlotId slot) { return slots_[slot].num_pins == 0; });
      if (id == kNoSlot) break;
      if (!index_.admit(keys[slots.size()], id)) {
        acquired.num_declined = keys.size() - slots.size();
        for (const PageKey& key : keys.subspan(slots.size() + 1)) index_.admit(key, kNoSlot);
        counters_.refused_admission.add(acquired.num_declined);
        break;
      }
      index_.erase(id);
      counters_.evicted.add();
    }
    slots_[id].state = State::kWriting;
    slots.push_back(id);
  }
  return slots;
}

SlotSpace::Acquired SlotSpace::acquire(std::span<const PageKey> keys) {
  Acquired acquired;
  std::vector<SlotId> taken = take_slots(keys, acquired);
  std::sort(taken.begin(), taken.end());
  std::vector<SlotId> described;
  {
    std::lock_guard lock(mutex_);
    std::copy_if(taken.begin(), taken.end(), std::back_inserter(described),
                 [this](SlotId id) { return slots_[id].has_record; });
  }
  std::vector<SlotId> unusable;
  for_each_range(described, [&](std::span<const SlotId> range) {
    if (clear_records_of(range)) return;
    acquired.rest = Code::kIo;
    unusable.insert(unusable.end(), range.begin(), range.end());
  });
  for (const SlotId id : unusable) release(id);
  std::set_difference(taken.begin(), taken.end(), unusable.begin(), unusable.end(),
                      std::back_inserter(acquired.slots));
  return acquired;
}

Status SlotSpace::grow() {
  std::lock_guard resize_lock(resize_mutex_);
  std::uint32_t num_slots = 0;
  {
    std::lock_guard lock(mutex_);
    // Somebody else grew meanwhile, or slots are being given back.
    if (!free_.empty() || limit_ != num_slots_ || clock_.now() < next_growth_) return {};
    num_slots = num_slots_;
  }
  const Status grown = node_.grow(*region_, num_slots, extent_slots_, [&](std::uint32_t num_more) -> Status {
    TPUSYNC_TRY(region_->resize(num_slots + num_more));
    std::lock_guard lock(mutex_);
    grow_arrays(num_slots + num_more);
    return {};
  });
  if (!grown) {
    if (grown.error().code == Code::kIo) counters_.io_errors.add();
    std::lock_guard lock(mutex_);
    next_growth_ = clock_.now() + kGrowthRetry;
  }
  return grown;
}

void SlotSpace::release(SlotId slot) {
  std::lock_guard lock(mutex_);
  free_locked(slot);
}

std::uint64_t SlotSpace::next_generation() {
  std::lock_guard lock(mutex_);
  generation_ = std::max(generation_ + 1, generation_at(clock_.unix_ns()));
  return generation_ & kGenerationMax;
}

std::uint64_t SlotSpace::clear_count() {
  std::lock_guard lock(mutex_);
  return clear_count_;
}

// kOk: the entry is visible. kBusy: another thread stored the same page first. kCancelled: cleared meanwhile.
// kExhausted: the slot is being given back. Call with mutex_ held.
Code SlotSpace::insert_locked(SlotId id, const SlotRecord& record, std::uint64_t clear_count) {
  if (index_.find(record.key) != kNoSlot) return Code::kBusy;
  if (clear_count != clear_count_) return Code::kCancelled;
  if (to_number(id) >= limit_) return Code::kExhausted;
  Slot& slot = slots_[id];
  slot.generation = record.generation;
  slot.payload_checksum = record.payload_checksum;
  slot.state = State::kPresent;
  index_.insert(id, record.key, record.ancestry);
  return Code::kOk;
}

std::vector<Code> SlotSpace::publish(SlotId first, std::span<const SlotRecord> records,
                                     std::uint64_t clear_count) {
  const auto slot_at = [&](std::size_t i) {
    return SlotId{to_number(first) + static_cast<std::uint32_t>(i)};
  };
  {
    std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < records.size(); ++i) slots_[slot_at(i)].has_record = true;
  }
  const Status written = region_->write_records(first, records);
  std::vector<Code> codes(records.size(), written ? Code::kOk : written.error().code);
  std::vector<SlotId> unused;
  {
    std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < records.size(); ++i) {
      if (written) codes[i] = insert_locked(slot_at(i), records[i], clear_count);
      if (codes[i] != Code::kOk) unused.push_back(slot_at(i));
      if (codes[i] == Code::kBusy) codes[i] = Code::kOk;  // just as good
    }
  }
  // What may have been written must not be found again. If that fails, acquire() will try once more.
  for_each_range(unused, [this](std::span<const SlotId> range) { (void)clear_records_of(range); });
  for (const SlotId id : unused) release(id);
  return codes;
}

// ---------------------------------------------------------------- dropping entries

void SlotSpace::drop(SlotId id, std::uint64_t generation) {
  {
    std::lock_guard lock(mutex_);
    Slot& slot = slots_[id];
    if (slot.state != State::kPresent || slot.generation != generation) return;
    leave_locked(id);
  }
  (void)clear_records_of(std::span(&id, 1));
}

// Slots that nobody can find any more. Their pins go first to last; then they are free.
std::size_t SlotSpace::clear_and_free(std::vector<SlotId> slots) {
  std::sort(slots.begin(), slots.end());
  for_each_range(slots, [this](std::span<const SlotId> range) {
    (void)clear_records_of(range);
    std::lock_guard lock(mutex_);
    for (const SlotId id : range) {
      if (--slots_[id].num_pins == 0) free_locked(id);
    }
  });
  return slots.size();
}

std::size_t SlotSpace::remove(std::span<const PageKey> keys) {
  std::vector<SlotId> slots;
  {
    std::lock_guard lock(mutex_);
    for (const PageKey& key : keys) {
      const SlotId id = index_.find(key);
      if (id == kNoSlot) continue;
      leave_locked(id);
      ++slots_[id].num_pins;  // ours, until its record is cleared
      slots.push_back(id);
    }
  }
  counters_.removed.add(slots.size());
  return clear_and_free(std::move(slots));
}

std::size_t SlotSpace::clear() {
  std::vector<SlotId> slots;
  {
    std::lock_guard lock(mutex_);
    ++clear_count_;
    for (std::uint32_t i = 0; i < num_slots_; ++i) {
      const SlotId id{i};
      if (slots_[id].state != State::kPresent) continue;
      leave_locked(id);
      ++slots_[id].num_pins;
      slots.push_back(id);
    }
  }
  counters_.removed.add(slots.size());
  return clear_and_free(std::move(slots));
}

// ---------------------------------------------------------------- giving back

void SlotSpace::housekeep() {
  sweep();
  std::unique_lock lock(mutex_);
  const std::uint32_t num_slots = num_slots_;
  const std::uint32_t limit = limit_;
  lock.unlock();
  if (limit < num_slots) {
    shrink_to(limit);
  } else if (const std::uint32_t num_back = node_.slots_to_give_back(*region_, num_slots, extent_slots_)) {
    shrink_to(num_slots - num_back);
  }
}

// Drops what lies behind the new end and cuts the files; if some of it is being read or written just now,
// that waits for a later call.
void SlotSpace::shrink_to(std::uint32_t num_slots) {
  std::lock_guard resize_lock(resize_mutex_);
  {
    std::lock_guard lock(mutex_);
    if (num_slots > num_slots_) return;
    limit_ = num_slots;
    std::erase_if(free_, [&](SlotId id) { return to_number(id) >= limit_; });
    bool busy = false;
    for (std::uint32_t i = limit_; i < num_slots_; ++i) {
      Slot& slot = slots_[SlotId{i}];
      if (slot.state == State::kPresent) {
        leave_locked(SlotId{i});
        counters_.evicted.add();
        if (slot.num_pins == 0) slot.state = State::kFree;
      }
      busy = busy || slot.state != State::kFree;
    }
    if (busy) return;
  }
  const Status cut = region_->resize(num_slots);
  std::lock_guard lock(mutex_);
  if (!cut) {
    base::log(base::LogLevel::kWarning, fmt::format("space cannot be given back: {}", cut.error().message));
    return;
  }
  for (std::uint32_t i = num_slots; i < num_slots_; ++i) slots_[SlotId{i}] = {};
  num_slots_ = num_slots;
  counters_.extents_given_back.add();
}

SlotSpace::Gauges SlotSpace::gauges() {
  std::lock_guard lock(mutex_);
  return {.entries = index_.size(),
          .slots = num_slots_,
          .recovered_entries = recovered_entries_,
          .recovery_ms = recovery_ms_};
}

bool SlotSpace::consistent() {
  std::lock_guard lock(mutex_);
  std::size_t num_present = 0;
  std::size_t num_free = 0;
  for (std::uint32_t i = 0; i < num_slots_; ++i) {
    const Slot& slot = slots_[SlotId{i}];
    num_present += slot.state == State::kPresent;
    num_free += slot.state == State::kFree && i < limit_;
    if ((slot.state == State::kPresent) != index_.occupied(SlotId{i})) return false;
  }
  return index_.consistent() && num_present == index_.size() && num_free == free_.size();
}

}  // namespace tpusync::flash
