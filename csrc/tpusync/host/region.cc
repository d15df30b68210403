#include "tpusync/host/region.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cstring>

#include "tpusync/base/log.h"
#include "tpusync/host/checked_copy.h"

namespace tpusync::host {

using base::Code;
using base::Result;
using base::Status;
using index::Ancestry;
using index::kNoSlot;
using index::PageKey;
using index::SlotId;

namespace {
constexpr std::size_t kNumPopulateParts = 256;
constexpr int kNumAncestorsMax = 65536;
}  // namespace

Ancestry ancestry_of(std::span<const PageKey> prefix, std::span<const PageKey> keys, std::size_t i) {
  Ancestry ancestry;
  if (i > 0) {
    ancestry.parent = keys[i - 1].short_hash();
  } else if (!prefix.empty()) {
    ancestry.parent = prefix.back().short_hash();
  }
  ancestry.depth = static_cast<std::uint16_t>(std::min<std::size_t>(prefix.size() + i, 0xffff));
  return ancestry;
}

Region::Region(std::unique_ptr<RegionFile> file)
    : file_(std::move(file)),
      seals_(file_->seals()),
      keys_(file_->keys()),
      book_(static_cast<std::uint32_t>(file_->geometry().num_slots)),
      next_generation_(file_->state().epoch << kGenerationCountBits) {
  marks_.grow_to(file_->geometry().num_slots);
}

Result<std::unique_ptr<Region>> Region::open(std::unique_ptr<RegionFile> file) {
  std::unique_ptr<Region> region(new Region(std::move(file)));
  region->recover();
  if (!region->file_->needs_populating()) return region;
  region->populate_ = std::jthread([file = region->file_.get()](std::stop_token stop) {
    // Without it the first write to each small page of an adopted pool would fault.
    for (std::size_t i = 0; i < kNumPopulateParts && !stop.stop_requested(); ++i) {
      (void)file->populate_part(i, kNumPopulateParts);
    }
  });
  return region;
}

Region::~Region() = default;

void Region::recover() {
  struct Entry {
    SlotId slot;
    std::uint64_t generation;
  };
  std::vector<Entry> found;
  keys_.clear();
  for (std::uint64_t i = 0; i < file_->header().num_slots_max; ++i) {
    const SlotId slot{static_cast<std::uint32_t>(i)};
    const std::optional<Seal> seal = seals_.read(slot);
    const bool wanted = seal && i < geometry().num_slots && seal->length_bytes == geometry().page_bytes();
    if (wanted && find_locked(seal->key) == kNoSlot) {
      keys_.insert(seal->key.short_hash(), slot);
      marks_[slot] = {seal->key.short_hash(), false};
      found.push_back({slot, seal->generation});
      continue;
    }
    if (!seals_.marked(slot)) continue;
    if (!seal) counters_.damaged_records.add();
    seals_.retract(slot);
  }
  // Oldest seal first, and every page before its ancestors: walk from the newest, ancestors first, then turn
  // around.
  std::sort(found.begin(), found.end(),
            [](const Entry& a, const Entry& b) { return a.generation > b.generation; });
  std::vector<SlotId> order, path;
  std::vector<bool> placed(geometry().num_slots);
  for (const Entry& entry : found) {
    for (SlotId at = entry.slot; at != kNoSlot && !placed[index::to_number(at)]; at = parent_of(at)) {
      placed[index::to_number(at)] = true;
      path.push_back(at);
    }
    order.insert(order.end(), path.rbegin(), path.rend());
    path.clear();
  }
  std::reverse(order.begin(), order.end());
  book_.recover(order);
  counters_.adopted.add(order.size());
}

SlotId Region::find_locked(const PageKey& key) const {
  return keys_.find(key.short_hash(), [&](SlotId slot) {
    const std::optional<Seal> seal = seals_.read(slot);
    return seal && seal->key == key;
  });
}

SlotId Region::parent_of(SlotId slot) const {
  const std::optional<Seal> seal = seals_.read(slot);
  if (!seal || seal->ancestry.parent == 0) return kNoSlot;
  return keys_.find(seal->ancestry.parent, [&](SlotId candidate) {
    const std::optional<Seal> parent = seals_.read(candidate);
    return candidate != slot && parent && parent->key.short_hash() == seal->ancestry.parent;
  });
}

// The record only: the book decides on the slot.
void Region::retract_locked(SlotId slot) {
  keys_.erase(marks_[slot].short_hash, slot);
  seals_.retract(slot);
}

void Region::drop_locked(SlotId slot) {
  retract_locked(slot);
  book_.unseal(slot);
}

std::vector<SlotId> Region::alloc(std::size_t count) {
  std::lock_guard lock(mutex_);
  std::vector<SlotId> slots;
  if (count > book_.num_available()) return slots;
  slots.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const SlotId slot = book_.next();
    if (book_.sealed(slot)) {
      retract_locked(slot);
      counters_.evicted.add();
    }
    slots.push_back(book_.take());
  }
  return slots;
}

Status Region::free(std::span<const SlotId> slots) {
  std::lock_guard lock(mutex_);
  for (const SlotId slot : slots) {
    if (index::to_number(slot) >= book_.num_slots() || !book_.used(slot)) {
      return base::fail(Code::kInvalid,
                        fmt::format("slot {} is freed, but not in use", index::to_number(slot)));
    }
  }
  // Backwards: the head of a prefix becomes the youngest, so it is evicted last. A slot that is named twice
  // would have passed the check above.
  for (std::size_t i = slots.size(); i-- > 0;) {
    if (book_.used(slots[i])) book_.give_back(slots[i]);
  }
  if (!slots.empty() && book_.sealed(slots.front())) touch_ancestors_locked(slots.front());
  return {};
}

std::size_t Region::num_available() const {
  std::lock_guard lock(mutex_);
  return book_.num_available();
}

void Region::free_all() {
  std::lock_guard lock(mutex_);
  book_.clear();
}

// Ancestors that are no longer in use must stay younger than what hangs below them. The first one that is in
// use ends the walk: it will be freed later than this one, and be younger by that.
void Region::touch_ancestors_locked(SlotId slot) {
  for (int i = 0; i < kNumAncestorsMax; ++i) {
    slot = parent_of(slot);
    if (slot == kNoSlot || book_.used(slot)) return;
    book_.touch(slot);
  }
}

std::uint64_t Region::checksum_of(const PageKey& key, SlotId slot) const {
  CheckedCopy sum(payload_seed(seals_.seed(), key));
  for (std::size_t i = 0; i < file_->num_pieces(); ++i) sum.look(piece(slot, i));
  return sum.value();
}

std::vector<Code> Region::seal(std::span<const PageKey> prefix, std::span<const PageKey> keys,
                               std::span<const SlotId> slots) {
  std::vector<Code> outcomes(keys.size(), Code::kInvalid);
  for (std::size_t i = 0; i < keys.size() && i < slots.size(); ++i) {
    outcomes[i] = seal_slot(keys[i], ancestry_of(prefix, keys, i), slots[i]);
  }
  touch(prefix, keys);
  return outcomes;
}

bool Region::in_use_locked(SlotId slot) const {
  return index::to_number(slot) < book_.num_slots() && book_.used(slot);
}

bool Region::current_locked(SlotUse use) const {
  return in_use_locked(use.slot) && book_.use(use.slot) == use.use;
}

Code Region::seal_slot(const PageKey& key, Ancestry ancestry, SlotId slot) {
  SlotUse use;
  {
    std::lock_guard lock(mutex_);
    if (!in_use_locked(slot)) {
      counters_.not_in_use.add();
      return Code::kInvalid;
    }
    // Sealed elsewhere in a slot that is in use, too: one of the two will do.
    const SlotId there = find_locked(key);
    if (there != kNoSlot && book_.used(there)) {
      counters_.sealed_already.add();
      return Code::kOk;
    }
    use = {slot, book_.use(slot)};
  }
  return seal_known(key, ancestry, use, checksum_of(key, slot));
}

Result<std::vector<SlotUse>> Region::begin_write(std::span<const SlotId> slots) {
  std::vector<SlotId> sorted(slots.begin(), slots.end());
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    return base::fail(Code::kInvalid, fmt::format("slot {} is named twice", index::to_number(*twice)));
  }
  std::lock_guard lock(mutex_);
  for (const SlotId slot : slots) {
    if (in_use_locked(slot)) continue;
    counters_.not_in_use.add();
    return base::fail(Code::kInvalid, fmt::format("slot {} is not in use", index::to_number(slot)));
  }
  std::vector<SlotUse> uses;
  uses.reserve(slots.size());
  for (const SlotId slot : slots) {
    if (book_.sealed(slot)) drop_locked(slot);
    uses.push_back({slot, book_.use(slot)});
  }
  return uses;
}

Code Region::seal_bytes(const PageKey& key, Ancestry ancestry, SlotUse use) {
  {
    std::lock_guard lock(mutex_);
    if (!current_locked(use)) {
      counters_.freed_while_sealing.add();
      return Code::kCancelled;
    }
  }
  return seal_known(key, ancestry, use, checksum_of(key, use.slot));
}

Code Region::seal_known(const PageKey& key, Ancestry ancestry, SlotUse use, std::uint64_t payload_checksum) {
  std::lock_guard lock(mutex_);
  if (!current_locked(use)) {
    counters_.freed_while_sealing.add();
    return Code::kCancelled;
  }
  const SlotId slot = use.slot;
  const SlotId there = find_locked(key);
  if (there != kNoSlot && (there == slot || book_.used(there))) {
    counters_.sealed_already.add();
    return Code::kOk;
  }
  if (book_.sealed(slot)) drop_locked(slot);
  seals_.publish(slot, {.key = key,
                        .ancestry = ancestry,
                        .generation = ++next_generation_,
                        .payload_checksum = payload_checksum,
                        .length_bytes = static_cast<std::uint32_t>(geometry().page_bytes())});
  keys_.insert(key.short_hash(), slot);
  marks_[slot] = {key.short_hash(), true};
  book_.seal(slot);
  // The slot in use will be freed after the one that is not: the seal moves to it. In this order, so that
  // whoever is killed in between leaves the page there.
  if (there != kNoSlot) drop_locked(there);
  counters_.sealed.add();
  return Code::kOk;
}

std::size_t Region::match(std::span<const PageKey> keys) const {
  std::size_t num_found = 0;
  while (num_found < keys.size() && contains(keys[num_found])) ++num_found;
  return num_found;
}

// Without the lock, as a reader of another process would: an answer for this moment either way.
bool Region::contains(const PageKey& key) const {
  return find_locked(key) != kNoSlot;
}

void Region::touch(std::span<const PageKey> prefix, std::span<const PageKey> keys) {
  std::lock_guard lock(mutex_);
  const auto touch_all = [this](std::span<const PageKey> path) {
    for (std::size_t i = path.size(); i-- > 0;) {
      if (const SlotId slot = find_locked(path[i]); slot != kNoSlot) book_.touch(slot);
    }
  };
  touch_all(keys);
  touch_all(prefix);
  if (!prefix.empty() || keys.empty()) return;
  if (const SlotId head = find_locked(keys.front()); head != kNoSlot) touch_ancestors_locked(head);
}

std::optional<Region::Found> Region::find(const PageKey& key) const {
  const SlotId slot = find_locked(key);
  if (slot == kNoSlot) return std::nullopt;
  const std::optional<Seal> seal = seals_.read(slot);
  if (!seal || seal->key != key) return std::nullopt;
  return Found{slot, *seal};
}

Result<Seal> Region::get(const PageKey& key, Pieces to, Verify verify) {
  std::optional<Found> found;
  bool verified = false;
  {
    std::lock_guard lock(mutex_);
    found = find(key);
    if (found) verified = verify == Verify::kOnce && marks_[found->slot].verified;
  }
  if (!found) {
    counters_.misses.add();
    return base::fail(Code::kNotFound, "not in this region");
  }
  CheckedCopy copy(payload_seed(seals_.seed(), key));
  for (std::size_t i = 0; i < file_->num_pieces(); ++i) {
    const std::span<const std::byte> from = piece(found->slot, i);
    if (verified) {
      std::memcpy(to[i], from.data(), from.size());
    } else {
      copy.copy(to[i], from);
    }
  }
  if (verified) return finish_read(*found, Check::kNone);
  return finish_read(*found, copy.value() == found->seal.payload_checksum ? Check::kRight : Check::kWrong);
}

// After the last byte was read.
Result<Seal> Region::finish_read(const Found& found, Check check) {
  std::lock_guard lock(mutex_);
  if (!seals_.holds(found.slot, found.seal.generation)) {
    counters_.overtaken.add();
    return base::fail(Code::kNotFound, "its slot was allocated while it was read");
  }
  if (check != Check::kNone) counters_.verified.add();
  if (check == Check::kWrong) {
    counters_.corrupt.add();
    drop_locked(found.slot);
    return base::fail(Code::kCorrupt, "its bytes are not what was sealed");
  }
  if (check == Check::kRight) marks_[found.slot].verified = true;
  counters_.hits.add();
  return found.seal;
}

bool Region::verify(const PageKey& key) {
  const std::optional<Found> found = find(key);
  if (!found) return false;
  const bool right = checksum_of(key, found->slot) == found->seal.payload_checksum;
  return finish_read(*found, right ? Check::kRight : Check::kWrong).has_value();
}

std::optional<Pin> Region::pin(const PageKey& key, PinKind kind) {
  std::lock_guard lock(mutex_);
  const SlotId slot = find_locked(key);
  if (slot == kNoSlot) return std::nullopt;
  return book_.pin(slot, kind);
}

void Region::unpin(const Pin& pin) {
  std::lock_guard lock(mutex_);
  book_.unpin(pin);
}

std::size_t Region::remove(std::span<const PageKey> keys) {
  std::lock_guard lock(mutex_);
  std::size_t num_removed = 0;
  for (const PageKey& key : keys) {
    const SlotId slot = find_locked(key);
    if (slot == kNoSlot) continue;
    drop_locked(slot);
    ++num_removed;
  }
  return num_removed;
}

std::size_t Region::clear() {
  std::lock_guard lock(mutex_);
  std::size_t num_removed = 0;
  for (std::uint32_t i = 0; i < book_.num_slots(); ++i) {
    if (!book_.sealed(SlotId{i})) continue;
    drop_locked(SlotId{i});
    ++num_removed;
  }
  return num_removed;
}

std::vector<PageKey> Region::keys() const {
  std::lock_guard lock(mutex_);
  std::vector<PageKey> keys;
  keys.reserve(book_.num_sealed());
  for (std::uint32_t i = 0; i < book_.num_slots(); ++i) {
    if (const std::optional<Seal> seal = seals_.read(SlotId{i})) keys.push_back(seal->key);
  }
  return keys;
}

std::vector<PageKey> Region::oldest(std::size_t limit) const {
  std::lock_guard lock(mutex_);
  std::vector<PageKey> keys;
  for (const SlotId slot : book_.oldest(limit)) {
    if (const std::optional<Seal> seal = seals_.read(slot)) keys.push_back(seal->key);
  }
  return keys;
}

std::vector<PageKey> Region::path_of(const PageKey& key) const {
  std::lock_guard lock(mutex_);
  std::vector<PageKey> path;
  SlotId slot = find_locked(key);
  for (int i = 0; i < kNumAncestorsMax && slot != kNoSlot; ++i) {
    slot = parent_of(slot);
    if (slot == kNoSlot) break;
    if (const std::optional<Seal> seal = seals_.read(slot)) path.push_back(seal->key);
  }
  std::reverse(path.begin(), path.end());
  return path;
}

std::vector<metrics::Sample> Region::samples() const {
  std::lock_guard lock(mutex_);
  const auto count = [](const metrics::Counter& counter) { return counter.value(); };
  return {
      {"host_slots", std::uint64_t{book_.num_slots()}},
      {"host_slots_used", std::uint64_t{book_.num_used()}},
      {"host_slots_blank", std::uint64_t{book_.num_blank()}},
      {"host_pages_sealed", std::uint64_t{book_.num_sealed()}},
      {"host_page_bytes", geometry().page_bytes()},
      {"host_pages_adopted_total", count(counters_.adopted)},
      {"host_records_damaged_total", count(counters_.damaged_records)},
      {"host_seals_total", count(counters_.sealed)},
      {"host_sealed_bytes_total", count(counters_.sealed) * geometry().page_bytes()},
      {"host_seals_already_total", count(counters_.sealed_already)},
      {"host_seals_not_in_use_total", count(counters_.not_in_use)},
      {"host_seals_cancelled_total", count(counters_.freed_while_sealing)},
      {"host_pages_evicted_total", count(counters_.evicted)},
      {"host_hits_total", count(counters_.hits)},
      {"host_misses_total", count(counters_.misses)},
      {"host_pages_verified_total", count(counters_.verified)},
      {"host_pages_corrupt_total", count(counters_.corrupt)},
      {"host_reads_overtaken_total", count(counters_.overtaken)},
  };
}

bool Region::consistent() const {
  std::lock_guard lock(mutex_);
  if (!book_.consistent()) return false;
  for (std::uint32_t i = 0; i < book_.num_slots(); ++i) {
    const std::optional<Seal> seal = seals_.read(SlotId{i});
    if (seal.has_value() != book_.sealed(SlotId{i})) return false;
    if (seal && find_locked(seal->key) != SlotId{i}) return false;
  }
  return true;
}

}  // namespace tpusync::host
