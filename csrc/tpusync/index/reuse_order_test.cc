#include "tpusync/index/reuse_order.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "tpusync/base/prng.h"

namespace tpusync::index {
namespace {

constexpr auto kAny = [](SlotId) { return true; };

SlotId slot_of(std::uint64_t number) {
  return SlotId{static_cast<std::uint32_t>(number)};
}
std::uint64_t hash_of(std::uint64_t number) {
  return base::Prng(number).next() & PageKey::kShortHashMask;
}

class Order : public ::testing::Test {
 protected:
  static constexpr std::size_t kNumSlots = 1000;
  Order() { order_.grow_to(kNumSlots); }

  void insert(std::uint64_t number) { order_.insert(slot_of(number), hash_of(number), kNoSlot, true); }
  void let_time_pass(int num_uses) {
    for (int i = 0; i < num_uses; ++i) order_.admit(hash_of(next_stranger_++), kNoSlot);
  }

  ReuseOrder order_;
  std::uint64_t next_stranger_ = 1'000'000;
};

TEST_F(Order, WithoutHistoryTheLeastRecentlyUsedGoesFirst) {
  for (std::uint64_t i = 0; i < 5; ++i) {
    insert(i);
    let_time_pass(200);
  }
  order_.touch(slot_of(0));
  for (std::uint64_t wanted : {1, 2, 3, 4}) {
    const SlotId victim = order_.victim(kAny);
    EXPECT_EQ(to_number(victim), wanted);
    order_.erase(victim, hash_of(wanted));
  }
}

TEST_F(Order, OnlyLeavesGoAndOnlyThoseThatMay) {
  for (std::uint64_t i = 0; i < 3; ++i) insert(i);
  order_.set_leaf(slot_of(0), false);
  for (int i = 0; i < 2; ++i) {
    const SlotId victim = order_.victim([](SlotId slot) { return slot != slot_of(1); });
    EXPECT_EQ(victim, slot_of(2));
  }
  EXPECT_EQ(order_.victim(kAny), order_.victim(kAny));
  order_.set_leaf(slot_of(0), true);
  order_.erase(slot_of(2), hash_of(2));
  order_.erase(slot_of(1), hash_of(1));
  EXPECT_EQ(order_.victim(kAny), slot_of(0));
  EXPECT_EQ(order_.victim([](SlotId) { return false; }), kNoSlot);
}

TEST_F(Order, WithoutAnyLeafSomethingStillGoes) {
  insert(0);
  insert(1);
  order_.set_leaf(slot_of(0), false);
  order_.set_leaf(slot_of(1), false);
  EXPECT_NE(order_.victim(kAny), kNoSlot);
}

// A page that is looked up, read and named as a prefix was used once.
TEST_F(Order, UsesAtNearlyTheSameTimeAreOne) {
  insert(0);
  insert(1);
  for (int i = 0; i < 10; ++i) order_.touch(slot_of(0));
  let_time_pass(200);
  for (std::uint64_t number : {1, 0}) {
    EXPECT_EQ(order_.victim(kAny), slot_of(1 - number));
    order_.touch(slot_of(1 - number));
    let_time_pass(200);
  }
}

// Pages that are never used again pass by in great number; those that return must survive them.
TEST_F(Order, AScanDoesNotDisplaceWhatReturns) {
  std::map<std::uint32_t, std::uint64_t> stored;  // slot -> number
  std::map<std::uint64_t, std::uint32_t> slots;
  std::vector<SlotId> free;
  for (std::uint32_t i = 0; i < 200; ++i) free.push_back(SlotId{i});
  std::uint64_t num_hits = 0;
  const auto use = [&](std::uint64_t number) {
    if (const auto at = slots.find(number); at != slots.end()) {
      order_.touch(SlotId{at->second});
      ++num_hits;
      return;
    }
    if (free.empty()) {
      const SlotId victim = order_.victim(kAny);
      if (!order_.admit(hash_of(number), victim)) return;
      const std::uint64_t gone = stored.at(to_number(victim));
      order_.erase(victim, hash_of(gone));
      stored.erase(to_number(victim));
      slots.erase(gone);
      free.push_back(victim);
    }
    const SlotId slot = free.back();
    free.pop_back();
    order_.insert(slot, hash_of(number), kNoSlot, true);
    stored[to_number(slot)] = number;
    slots[number] = to_number(slot);
  };
  std::uint64_t next_of_scan = 1'000'000;
  for (int round = 0; round < 400; ++round) {
    if (round == 200) num_hits = 0;
    order_.begin_request();
    for (std::uint64_t i = 0; i < 100; ++i) use(i);
    for (int i = 0; i < 300; ++i) use(next_of_scan++);
  }
  // Least recently used would have none: a round has more pages than the store.
  EXPECT_GT(num_hits, 200u * 100 * 8 / 10);
  EXPECT_TRUE(order_.consistent());
}

TEST_F(Order, RecoveredEntriesKeepTheirOrder) {
  for (std::uint64_t i = 0; i < 900; ++i) order_.append(slot_of(i), true);
  std::vector<std::uint32_t> seen;
  order_.for_each([&](SlotId slot) { seen.push_back(to_number(slot)); });
  ASSERT_EQ(seen.size(), 900u);
  for (std::size_t i = 1; i < seen.size(); ++i) EXPECT_GT(seen[i], seen[i - 1]);
  double sum = 0;
  for (std::uint64_t i = 0; i < 100; ++i) {
    const SlotId victim = order_.victim(kAny);
    sum += to_number(victim);
    order_.erase(victim, hash_of(to_number(victim)));
  }
  EXPECT_GT(sum / 100, 750);  // the oldest out of a sample, not of all
  EXPECT_TRUE(order_.consistent());
}

// Random calls for a long time: the books agree and the same calls give the same order.
TEST(ReuseOrderModel, RandomCallsKeepTheBooksAndRepeat) {
  std::vector<std::uint32_t> victims[2];
  for (auto& log : victims) {
    ReuseOrder order;
    order.grow_to(300);
    base::Prng prng(7);
    std::map<std::uint32_t, std::uint64_t> stored;
    for (int step = 0; step < 60'000; ++step) {
      const auto slot = SlotId{static_cast<std::uint32_t>(prng.below(300))};
      const auto at = stored.find(to_number(slot));
      if (at == stored.end()) {
        const std::uint64_t number = prng.below(3000);
        order.insert(slot, hash_of(number), kNoSlot, prng.one_in(2));
        stored[to_number(slot)] = number;
      } else if (prng.one_in(8)) {
        const SlotId victim = order.victim([&](SlotId s) { return to_number(s) % 7 != 0; });
        if (victim == kNoSlot) continue;
        ASSERT_NE(to_number(victim) % 7, 0u);
        log.push_back(to_number(victim));
        order.erase(victim, hash_of(stored.at(to_number(victim))));
        stored.erase(to_number(victim));
      } else if (prng.one_in(4)) {
        order.set_leaf(slot, prng.one_in(2));
      } else {
        order.touch(slot);
      }
      if (step % 10'000 == 0) {
        ASSERT_TRUE(order.consistent()) << step;
      }
    }
    EXPECT_TRUE(order.consistent());
  }
  EXPECT_EQ(victims[0], victims[1]);
}

}  // namespace
}  // namespace tpusync::index
