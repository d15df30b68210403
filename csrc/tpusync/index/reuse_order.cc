#include "tpusync/index/reuse_order.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace tpusync::index {

namespace {

constexpr std::size_t kSlotsPerGhost = 8;
// So many leaves are compared: the best of 64 is among the best 5 % with a probability of 96 %.
constexpr std::uint32_t kSampleSize = 64;
// Entries and ghosts that the hand meets per use.
constexpr std::size_t kHandStep = 16;
constexpr int kUsesPerLesson = 1024;
// What was learned fades over so many rounds of uses of all that is known.
constexpr double kMemoryRounds = 16;

}  // namespace

std::unique_ptr<EvictOrder> make_reuse_order() {
  return std::make_unique<ReuseOrder>();
}

void ReuseOrder::grow_to(std::size_t num_slots) {
  entries_.grow_to(num_slots);
  leaves_.grow_to(num_slots);
  num_slots_ = std::max(num_slots_, static_cast<std::uint32_t>(num_slots));
  ghosts_.reserve(num_slots_ / kSlotsPerGhost);
}

// ---------------------------------------------------------------- entries

// A page that was used `num_uses` times before is used once more; answers how often that makes.
std::uint8_t ReuseOrder::count_use(std::uint32_t last_use, std::uint32_t num_uses) {
  if (num_uses > 0) model_.add_use(ReuseModel::band_of(num_uses), ReuseModel::age_step(now_ - last_use));
  return static_cast<std::uint8_t>(std::min(num_uses + 1, 255u));
}

void ReuseOrder::insert(SlotId slot, std::uint64_t key_hash, SlotId, bool is_leaf) {
  const Ghost ghost = ghosts_.take(key_hash);
  Entry& entry = entries_[slot];
  entry.num_uses = count_use(ghost.last_use, ghost.num_uses);
  entry.last_use = now_;
  set_leaf(slot, is_leaf);
  pass_time();
}

void ReuseOrder::append(SlotId slot, bool is_leaf) {
  entries_[slot].last_use = now_ - ++num_appended_;
  entries_[slot].num_uses = 1;
  set_leaf(slot, is_leaf);
}

void ReuseOrder::touch(SlotId slot) {
  Entry& entry = entries_[slot];
  if (is_same_use(entry.last_use)) return;
  entry.num_uses = count_use(entry.last_use, entry.num_uses);
  entry.last_use = now_;
  pass_time();
}

void ReuseOrder::erase(SlotId slot, std::uint64_t key_hash) {
  Entry& entry = entries_[slot];
  ghosts_.put(key_hash, entry.last_use, entry.num_uses, now_);
  entry.num_uses = 0;
  entry.is_leaf = false;
}

void ReuseOrder::set_leaf(SlotId slot, bool is_leaf) {
  Entry& entry = entries_[slot];
  entry.is_leaf = is_leaf;
  if (!is_leaf || entry.is_listed) return;
  entry.is_listed = true;
  leaf_at(num_leaves_++) = slot;
}

void ReuseOrder::unlist(std::uint32_t i) {
  entries_[leaf_at(i)].is_listed = false;
  leaf_at(i) = leaf_at(--num_leaves_);
}

// ---------------------------------------------------------------- victims

float ReuseOrder::worth_of(const Entry& entry) const {
  return model_.worth(ReuseModel::band_of(entry.num_uses), ReuseModel::age_step(now_ - entry.last_use));
}

// A position in leaves_. All are looked at if they are few. Else the latest is one of them: once a page is
// gone its parent is next, so that one prefix shrinks rather than many.
std::uint32_t ReuseOrder::sample(std::uint32_t num_seen) {
  if (num_seen == 0 || num_leaves_ <= kSampleSize) return num_leaves_ - 1 - num_seen;
  return static_cast<std::uint32_t>(prng_.below(num_leaves_));
}

SlotId ReuseOrder::victim(const std::function<bool(SlotId)>& may_evict) {
  SlotId best = kNoSlot;
  float best_worth = 0;
  for (std::uint32_t num_seen = 0; num_seen < std::min(kSampleSize, num_leaves_);) {
    const std::uint32_t i = sample(num_seen);
    const SlotId slot = leaf_at(i);
    const Entry& entry = entries_[slot];
    if (!entry.is_leaf) {
      unlist(i);
      continue;
    }
    ++num_seen;
    const float worth = worth_of(entry);
    const bool is_worse = best == kNoSlot || worth < best_worth ||
                          (worth == best_worth && now_ - entry.last_use > now_ - entries_[best].last_use);
    if (!is_worse || !may_evict(slot)) continue;
    best = slot;
    best_worth = worth;
  }
  return best != kNoSlot ? best : any_entry(may_evict);
}

bool ReuseOrder::admit(std::uint64_t key_hash, SlotId victim) {
  const Ghost ghost = ghosts_.find(key_hash);
  const bool counts = ghost.num_uses == 0 || !is_same_use(ghost.last_use);
  const float worth = model_.worth(ReuseModel::band_of(ghost.num_uses + counts), 0);
  if (victim != kNoSlot && worth >= worth_of(entries_[victim])) return true;
  if (!counts) return false;
  ghosts_.put(key_hash, now_, count_use(ghost.last_use, ghost.num_uses), now_);
  pass_time();
  return false;
}

// Where hardly any leaf may go. An entry that is no leaf goes only if there is none: parents that name each
// other, out of damaged records, must not stay for ever.
SlotId ReuseOrder::any_entry(const std::function<bool(SlotId)>& may_evict) const {
  SlotId inner = kNoSlot;
  for (std::uint32_t i = 0; i < num_slots_; ++i) {
    const Entry& entry = entries_[SlotId{i}];
    if (entry.num_uses == 0 || (!entry.is_leaf && inner != kNoSlot) || !may_evict(SlotId{i})) continue;
    if (entry.is_leaf) return SlotId{i};
    inner = SlotId{i};
  }
  return inner;
}

void ReuseOrder::for_each(const std::function<void(SlotId)>& visit) const {
  std::vector<SlotId> slots;
  for (std::uint32_t i = 0; i < num_slots_; ++i) {
    if (entries_[SlotId{i}].num_uses > 0) slots.push_back(SlotId{i});
  }
  std::stable_sort(slots.begin(), slots.end(), [&](SlotId left, SlotId right) {
    return now_ - entries_[left].last_use < now_ - entries_[right].last_use;
  });
  for (SlotId slot : slots) visit(slot);
}

// ---------------------------------------------------------------- time

void ReuseOrder::meet(std::uint32_t last_use, std::uint32_t num_uses) {
  if (num_uses == 0) return;
  const std::size_t num_places = num_slots_ + ghosts_.places().size();
  const double uses_per_round = static_cast<double>(num_places) / kHandStep;
  model_.add_time(ReuseModel::band_of(num_uses), ReuseModel::age_step(now_ - last_use), uses_per_round);
}

void ReuseOrder::pass_time() {
  ++now_;
  const auto ghosts = ghosts_.places();
  for (std::size_t i = 0; i < kHandStep; ++i, ++hand_) {
    if (hand_ >= num_slots_ + ghosts.size()) hand_ = 0;
    if (hand_ < num_slots_) {
      const Entry& entry = entries_[SlotId{static_cast<std::uint32_t>(hand_)}];
      meet(entry.last_use, entry.num_uses);
    } else {
      const Ghost& ghost = ghosts[hand_ - num_slots_];
      meet(ghost.last_use, ghost.num_uses);
    }
  }
  if (now_ % kUsesPerLesson != 0) return;
  const double uses_remembered = kMemoryRounds * static_cast<double>(num_slots_ + ghosts.size());
  model_.refresh(std::exp(-kUsesPerLesson / uses_remembered));
}

bool ReuseOrder::consistent() const {
  std::uint32_t num_listed = 0;
  for (std::uint32_t i = 0; i < num_slots_; ++i) {
    const Entry& entry = entries_[SlotId{i}];
    num_listed += entry.is_listed;
    if (entry.is_leaf && (entry.num_uses == 0 || !entry.is_listed)) return false;
  }
  for (std::uint32_t i = 0; i < num_leaves_; ++i) {
    const SlotId slot = leaves_[SlotId{i}];
    if (to_number(slot) >= num_slots_ || !entries_[slot].is_listed) return false;
  }
  return num_listed == num_leaves_;
}

}  // namespace tpusync::index
