#include "tpusync/index/prefix_index.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <map>

#include "tpusync/base/prng.h"
#include "tpusync/testing/store_harness.h"

namespace tpusync::index {
namespace {

using testing::key_of;
using testing::keys_of;
using testing::range;

constexpr auto kAny = [](SlotId) { return true; };

class Index : public ::testing::Test {
 protected:
  Index() : index_(make_lru_order()) { index_.grow_to(20'000); }

  // Inserts page `number` as the child of `parent`, 0 for none.
  void insert(std::uint64_t number, std::uint64_t parent = 0) {
    index_.insert(SlotId{static_cast<std::uint32_t>(number)}, key_of(number),
                  {.parent = parent == 0 ? 0 : key_of(parent).short_hash(), .depth = 0});
  }
  std::uint32_t pop() {
    const SlotId victim = index_.victim(kAny);
    index_.erase(victim);
    return to_number(victim);
  }

  PrefixIndex index_;
};

TEST_F(Index, FindsWhatWasInsertedUntilItIsErased) {
  for (std::uint64_t i = 1; i <= 5000; ++i) insert(i);
  for (std::uint64_t i = 1; i <= 5000; ++i) EXPECT_EQ(to_number(index_.find(key_of(i))), i);
  for (std::uint64_t i = 1; i <= 5000; i += 2) index_.erase(SlotId{static_cast<std::uint32_t>(i)});
  for (std::uint64_t i = 1; i <= 5000; ++i) EXPECT_EQ(index_.find(key_of(i)) == kNoSlot, i % 2 == 1);
  EXPECT_EQ(index_.size(), 2500u);
  EXPECT_TRUE(index_.consistent());
}

TEST_F(Index, VictimIsTheLeastRecentlyUsedThatMayGo) {
  for (std::uint64_t i = 1; i <= 3; ++i) insert(i);
  index_.touch_path({}, keys_of(range(1, 2)));
  EXPECT_EQ(to_number(index_.victim(kAny)), 2u);
  EXPECT_EQ(to_number(index_.victim([](SlotId slot) { return to_number(slot) != 2; })), 3u);
  EXPECT_EQ(index_.victim([](SlotId) { return false; }), kNoSlot);
}

TEST_F(Index, ChainIsEvictedFromItsEnd) {
  insert(1);
  for (std::uint64_t i = 2; i <= 6; ++i) insert(i, i - 1);
  for (std::uint32_t wanted = 6; wanted >= 1; --wanted) EXPECT_EQ(pop(), wanted);
}

TEST_F(Index, TouchedLeafKeepsItsAncestorsWithAndWithoutThePrefixNamed) {
  for (const bool named : {true, false}) {
    insert(1);
    insert(2, 1);
    insert(3, 2);
    insert(100);
    insert(101);
    index_.touch_path(named ? keys_of(range(1, 3)) : std::vector<PageKey>(), keys_of(range(3, 4)));
    EXPECT_EQ(pop(), 100u);
    EXPECT_EQ(pop(), 101u);
    EXPECT_EQ(pop(), 3u);
    EXPECT_EQ(pop(), 2u);
    EXPECT_EQ(pop(), 1u);
  }
}

struct OrderCase {
  std::unique_ptr<EvictOrder> (*make)();
  bool counts_children;  // holds even if a child is stored before its parent
};
class AnyOrder : public ::testing::TestWithParam<OrderCase> {};

// Random trees, random touches, some children before their parents.
TEST_P(AnyOrder, NoVictimHasAStoredChild) {
  PrefixIndex index(GetParam().make());
  index.grow_to(5000);
  base::Prng prng(3);
  std::map<std::uint64_t, std::uint64_t> parent_of;
  std::uint64_t next = 1;
  const auto insert = [&](std::uint64_t number, std::uint64_t parent) {
    index.insert(SlotId{static_cast<std::uint32_t>(number)}, key_of(number),
                 {.parent = parent == 0 ? 0 : key_of(parent).short_hash(), .depth = 0});
    parent_of[number] = parent;
  };
  for (int step = 0; step < 4000; ++step) {
    if (prng.below(3) > 0 || parent_of.size() < 2) {
      std::uint64_t parent = 0;
      if (!parent_of.empty() && !prng.one_in(5)) {
        auto at = parent_of.lower_bound(prng.below(next));
        parent = (at == parent_of.end() ? parent_of.begin() : at)->first;
      }
      if (GetParam().counts_children && prng.one_in(10)) {
        insert(next + 1, next);
        insert(next, parent);
        next += 2;
      } else {
        insert(next++, parent);
      }
    } else if (prng.one_in(2)) {
      auto at = parent_of.lower_bound(prng.below(next));
      if (at != parent_of.end()) index.touch_path({}, keys_of(range(at->first, at->first + 1)));
    } else {
      const std::uint64_t victim = to_number(index.victim(kAny));
      index.erase(SlotId{static_cast<std::uint32_t>(victim)});
      for (const auto& [child, parent] : parent_of) ASSERT_NE(parent, victim) << "child " << child;
      parent_of.erase(victim);
    }
  }
  EXPECT_TRUE(index.consistent());
}
INSTANTIATE_TEST_SUITE_P(All, AnyOrder,
                         ::testing::Values(OrderCase{&make_lru_order, false},
                                           OrderCase{&make_reuse_order, true}));

// Each way in which a page can get to know of its children late.
TEST(Leaves, AreKnownWhateverComesFirst) {
  PrefixIndex index(make_reuse_order());
  index.grow_to(100);
  const auto insert = [&](std::uint32_t number, std::uint32_t parent) {
    index.insert(SlotId{number}, key_of(number),
                 {.parent = parent == 0 ? 0 : key_of(parent).short_hash(), .depth = 0});
  };
  insert(2, 1);  // a child before its parent
  insert(1, 0);
  EXPECT_EQ(index.victim(kAny), SlotId{2});
  index.erase(SlotId{1});  // a parent that is dropped, and comes back
  insert(1, 0);
  EXPECT_EQ(index.victim(kAny), SlotId{2});
  index.erase(SlotId{1});
  index.erase(SlotId{2});  // the child goes while the parent is away
  insert(1, 0);
  EXPECT_EQ(index.victim(kAny), SlotId{1});
  EXPECT_TRUE(index.consistent());
}

TEST(Leaves, AreKnownAfterARebuild) {
  PrefixIndex index(make_reuse_order());
  index.grow_to(100);
  const std::vector<SlotId> slots = {SlotId{3}, SlotId{2}, SlotId{1}};
  EXPECT_TRUE(index
                  .rebuild(slots,
                           [](SlotId slot) {
                             const std::uint32_t number = to_number(slot);
                             return PrefixIndex::Recovered{
                                 key_of(number),
                                 {.parent = number == 1 ? 0 : key_of(number - 1).short_hash(), .depth = 0}};
                           })
                  .empty());
  for (std::uint32_t wanted : {3, 2, 1}) {
    const SlotId victim = index.victim(kAny);
    EXPECT_EQ(to_number(victim), wanted);
    index.erase(victim);
  }
}

// Room is made for the page behind it: the tip of the path that was touched last is no victim if there is
// another.
TEST(Victims, AreNotTheParentOfThePageTheyMakeRoomFor) {
  for (auto make : {&make_lru_order, &make_reuse_order}) {
    PrefixIndex index(make());
    index.grow_to(10);
    const auto insert = [&](std::uint32_t number, std::uint32_t parent) {
      index.insert(SlotId{number}, key_of(number),
                   {.parent = parent == 0 ? 0 : key_of(parent).short_hash(), .depth = 0});
    };
    insert(1, 0);
    index.touch_path({}, keys_of(range(1, 2)));
    EXPECT_EQ(index.victim(kAny), SlotId{1});
    insert(2, 0);
    insert(3, 2);
    EXPECT_EQ(index.victim(kAny), SlotId{3});
    index.touch_path(keys_of(range(2, 3)), keys_of(range(3, 5)));
    EXPECT_EQ(index.victim(kAny), SlotId{1});
    EXPECT_FALSE(index.admit(key_of(4), kNoSlot));
    EXPECT_TRUE(index.admit(key_of(5), SlotId{1}));
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// 96 bytes per entry all told, of which a region takes 24 per slot.
TEST(Memory, AnEntryTakesAtMost72Bytes) {
  constexpr std::uint32_t kNumEntries = 1'100'000;  // just after the tables have doubled
  const auto in_use = [] { return mallinfo2().uordblks + mallinfo2().hblkhd; };
  const std::size_t before = in_use();
  PrefixIndex index(make_reuse_order());
  index.grow_to(kNumEntries);
  for (std::uint32_t i = 0; i < kNumEntries; ++i) {
    PageKey key;
    base::store_le(key.bytes.data(), std::uint64_t{i} + 1);
    index.insert(SlotId{i}, key, {.parent = i, .depth = 0});
  }
  EXPECT_GT(in_use() - before, 48u * kNumEntries);
  EXPECT_LE(in_use() - before, 72u * kNumEntries);
}
#endif

TEST_F(Index, RebuildPutsAncestorsBeforeTheirDescendants) {
  // Written 1, 2, 3 (a chain), then 9: newest first that is 9, 3, 2, 1.
  const std::map<std::uint32_t, std::uint64_t> parents = {{1, 0}, {2, 1}, {3, 2}, {9, 0}};
  const std::vector<SlotId> slots = {SlotId{9}, SlotId{3}, SlotId{2}, SlotId{1}};
  const auto duplicates = index_.rebuild(slots, [&](SlotId slot) {
    const std::uint64_t parent = parents.at(to_number(slot));
    return PrefixIndex::Recovered{key_of(to_number(slot)),
                                  {.parent = parent == 0 ? 0 : key_of(parent).short_hash(), .depth = 0}};
  });
  EXPECT_TRUE(duplicates.empty());
  EXPECT_EQ(index_.keys(), keys_of(std::vector<std::uint64_t>{9, 1, 2, 3}));
  EXPECT_TRUE(index_.consistent());
}

TEST_F(Index, RebuildKeepsTheNewerOfTwoAndSurvivesACycleOfParents) {
  const std::vector<SlotId> slots = {SlotId{5}, SlotId{6}, SlotId{7}};
  const auto duplicates = index_.rebuild(slots, [&](SlotId slot) {
    const std::uint64_t number = to_number(slot) == 7 ? 5 : to_number(slot);
    return PrefixIndex::Recovered{key_of(number),
                                  {.parent = key_of(number == 5 ? 6 : 5).short_hash(), .depth = 1}};
  });
  EXPECT_EQ(duplicates, std::vector<SlotId>{SlotId{7}});
  EXPECT_EQ(to_number(index_.find(key_of(5))), 5u);
  EXPECT_EQ(index_.size(), 2u);
  index_.touch_path({}, keys_of(range(5, 6)));
  EXPECT_TRUE(index_.consistent());
}

TEST_F(Index, FindAllAgreesWithFind) {
  for (std::uint64_t i = 1; i <= 3000; i += 2) insert(i);
  const auto slots = index_.find_all(keys_of(range(0, 3000)));
  for (std::uint64_t i = 0; i < 3000; ++i) EXPECT_EQ(slots[i], index_.find(key_of(i)));
  EXPECT_TRUE(index_.find_all({}).empty());
}

}  // namespace
}  // namespace tpusync::index
