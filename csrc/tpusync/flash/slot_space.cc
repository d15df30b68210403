#include "tpusync/flash/slot_space.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>

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
}  // namespace

SlotSpace::SlotSpace(Node& node, std::unique_ptr<Region> region, const base::Clock& clock, Counters& counters,
                     std::uint32_t extent_slots)
    : node_(node),
      region_(std::move(region)),
      clock_(clock),
      counters_(counters),
      extent_slots_(extent_slots),
      index_(index::make_lru_order()) {}

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

std::size_t SlotSpace::match(std::span<const PageKey> keys, std::span<const PageKey> prefix) {
  std::lock_guard lock(mutex_);
  const std::vector<SlotId> slots = index_.find_all(keys);
  const auto first_miss = std::find(slots.begin(), slots.end(), kNoSlot);
  index_.touch_path(prefix, std::span(slots.begin(), first_miss));
  return static_cast<std::size_t>(first_miss - slots.begin());
}

bool SlotSpace::present(const PageKey& key) {
  std::lock_guard lock(mutex_);
  return index_.find(key) != kNoSlot;
}

std::vector<bool> SlotSpace::contains(std::span<const PageKey> keys) {
  std::lock_guard lock(mutex_);
  const std::vector<SlotId> slots = index_.find_all(keys);
  std::vector<bool> found(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) found[i] = slots[i] != kNoSlot;
  return found;
}

std::vector<PinnedSlot> SlotSpace::pin(std::span<const PageKey> keys, std::span<const PageKey> prefix) {
  std::vector<PinnedSlot> pinned(keys.size());
  std::lock_guard lock(mutex_);
  const std::vector<SlotId> found = index_.find_all(keys);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (found[i] == kNoSlot) continue;
    Slot& slot = slots_[found[i]];
    ++slot.num_pins;
    pinned[i] = {found[i], slot.generation, slot.payload_checksum};
  }
  index_.touch_path(prefix, found);
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

// kNoSlot: neither a free slot nor an entry that may go. Call with mutex_ held.
SlotId SlotSpace::take_free_or_victim() {
  SlotId id = kNoSlot;
  if (!free_.empty()) {
    id = free_.back();
    free_.pop_back();
  } else {
    id = index_.victim([this](SlotId slot) { return slots_[slot].num_pins == 0; });
    if (id == kNoSlot) return kNoSlot;
    index_.erase(id);
    counters_.evicted.add();
  }
  slots_[id].state = State::kWriting;
  return id;
}

Status SlotSpace::clear_record_of(SlotId id) {
  TPUSYNC_TRY(region_->clear_records(id, 1));
  std::lock_guard lock(mutex_);
  slots_[id].has_record = false;
  return {};
}

Result<SlotId> SlotSpace::acquire() {
  SlotId id = kNoSlot;
  bool has_record = false;
  Status grown;
  {
    std::unique_lock lock(mutex_);
    if (free_.empty() && clock_.now() >= next_growth_) {
      lock.unlock();
      grown = grow();
      lock.lock();
    }
    id = take_free_or_victim();
    if (id != kNoSlot) has_record = slots_[id].has_record;
  }
  if (id == kNoSlot) {
    return base::fail(Code::kExhausted,
                      grown ? "every slot is being read or written" : grown.error().message);
  }
  if (has_record) {
    if (Status cleared = clear_record_of(id); !cleared) {
      release(id);
      return tl::unexpected(std::move(cleared).error());
    }
  }
  return id;
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
  return ++generation_ & kGenerationMax;
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

Status SlotSpace::publish(SlotId id, const SlotRecord& record, std::uint64_t clear_count) {
  {
    std::lock_guard lock(mutex_);
    slots_[id].has_record = true;
  }
  const Status written = region_->write_record(id, record);
  Code code = Code::kIo;
  if (written) {
    std::lock_guard lock(mutex_);
    code = insert_locked(id, record, clear_count);
    if (code == Code::kOk) return {};
  }
  // What may have been written must not be found again. If that fails, acquire() will try once more.
  (void)clear_record_of(id);
  release(id);
  if (!written) return written;
  if (code == Code::kBusy) return {};  // just as good
  return base::fail(code,
                    code == Code::kCancelled ? "the store was cleared" : "the slot is being given back");
}

// ---------------------------------------------------------------- dropping entries

void SlotSpace::drop(SlotId id, std::uint64_t generation) {
  {
    std::lock_guard lock(mutex_);
    Slot& slot = slots_[id];
    if (slot.state != State::kPresent || slot.generation != generation) return;
    leave_locked(id);
  }
  (void)clear_record_of(id);
}

// Slots that nobody can find any more. Their pins go first to last; then they are free.
std::size_t SlotSpace::clear_and_free(std::vector<SlotId> slots) {
  std::sort(slots.begin(), slots.end());
  for (std::size_t begin = 0, end = 0; begin < slots.size(); begin = end) {
    while (end < slots.size() && to_number(slots[end]) - to_number(slots[begin]) == end - begin) ++end;
    const bool cleared =
        region_->clear_records(slots[begin], static_cast<std::uint32_t>(end - begin)).has_value();
    std::lock_guard lock(mutex_);
    for (std::size_t i = begin; i < end; ++i) {
      if (cleared) slots_[slots[i]].has_record = false;
      if (--slots_[slots[i]].num_pins == 0) free_locked(slots[i]);
    }
  }
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
