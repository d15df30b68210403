#include "tpusync/tier/stack.h"

#include <gtest/gtest.h>

#include <thread>

#include "tpusync/host/testing.h"
#include "tpusync/testing/gated_files.h"
#include "tpusync/testing/sim_disk.h"
#include "tpusync/testing/store_harness.h"

namespace tpusync::tier {
namespace {

using base::Code;
using index::PageKey;
using index::SlotId;
using namespace host::testing;

constexpr std::chrono::seconds kLong{60};
exec::Deadline soon() {
  return std::chrono::steady_clock::now() + kLong;
}

using TurnedClock = tpusync::testing::SimClock;

// One process: a region, a flash store if asked for, and the stack over both.
class Process {
 public:
  Process(const std::string& dram, const std::string& flash, std::uint64_t num_slots, StackOptions options,
          std::uint64_t flash_bytes = 4 << 20, os::FileSystem& files = os::posix_file_system())
      : region(host::open_region(options_in(dram, small_geometry(num_slots))).value()) {
    if (!flash.empty()) {
      flash::FlashOptions flash_options = tpusync::testing::small_options(flash, 8192, flash_bytes);
      flash_options.clock = options.clock;
      store = flash::FlashStore::open(flash_options, files).value();
    }
    stack = Stack::open(options, *region, store.get()).value();
  }

  // Computes pages as SGLang does: slots are taken, written and put. Freed again unless told otherwise.
  void put(std::uint64_t first, std::size_t count, std::span<const PageKey> prefix = {}, bool keep = false) {
    const std::vector<SlotId> slots = region->alloc(count);
    ASSERT_EQ(slots.size(), count);
    for (std::size_t i = 0; i < count; ++i) fill_page(*region, slots[i], first + i);
    for (const Code code : stack->put(prefix, keys_of(first, count), slots)) ASSERT_EQ(code, Code::kOk);
    if (!keep) {
      ASSERT_TRUE(region->free(slots));
    }
  }

  std::vector<std::uint64_t> addresses_of(std::span<const SlotId> slots) const {
    std::vector<std::uint64_t> addresses;
    for (const SlotId slot : slots) {
      for (std::size_t p = 0; p < 2; ++p)
        addresses.push_back(reinterpret_cast<std::uint64_t>(region->piece(slot, p).data()));
    }
    return addresses;
  }

  base::Result<flash::BatchTicket> submit_get(std::uint64_t first, std::span<const SlotId> slots) {
    return stack->submit_get({.keys = keys_of(first, slots.size()),
                              .prefix = {},
                              .addresses = addresses_of(slots),
                              .slots = slots,
                              .deadline = {}});
  }

  // Gets into slots of the pool, as a prefetch does; answers how many leading pages arrived, all right.
  std::size_t get(std::uint64_t first, std::size_t count, std::vector<Code>* outcomes = nullptr) {
    const std::vector<SlotId> slots = region->alloc(count);
    EXPECT_EQ(slots.size(), count);
    const auto ticket = submit_get(first, slots);
    EXPECT_TRUE(ticket->ticket.wait(soon()));
    std::size_t num_good = 0;
    while (num_good < count && (*ticket->outcomes)[num_good] == Code::kOk) ++num_good;
    for (std::size_t i = 0; i < count; ++i) {
      if ((*ticket->outcomes)[i] == Code::kOk) {
        EXPECT_TRUE(holds(slots[i], first + i)) << i;
      }
    }
    if (outcomes != nullptr) *outcomes = *ticket->outcomes;
    EXPECT_TRUE(region->free(slots));
    EXPECT_TRUE(region->consistent());
    return num_good;
  }

  bool holds(SlotId slot, std::uint64_t number) const {
    base::Prng prng(number ^ 0xabcdef);
    for (std::size_t p = 0; p < 2; ++p) {
      std::vector<std::byte> expected(4096);
      prng.fill(expected);
      if (std::memcmp(expected.data(), region->piece(slot, p).data(), 4096) != 0) return false;
    }
    return true;
  }
  std::uint64_t count(std::string_view name) const { return metrics::value_of(stack->samples(), name); }

  std::unique_ptr<host::Region> region;
  std::unique_ptr<flash::FlashStore> store;
  std::unique_ptr<Stack> stack;
};

class StackTest : public ::testing::Test {
 protected:
  StackOptions options(SpillPolicy policy = SpillPolicy::kThrough) {
    StackOptions options;
    options.peer_refresh_period = std::chrono::milliseconds(0);
    options.spill.policy = policy;
    options.spill.num_ahead = 4;
    options.clock = &clock_;
    return options;
  }
  Process make(std::uint64_t num_slots, StackOptions with, bool flash = true) {
    return Process(dram_.path(), flash ? flash_.path() + "/" + std::to_string(num_made_++) : "", num_slots,
                   with);
  }
  MemoryDirectory dram_;
  tpusync::testing::TempDirectory flash_;
  tpusync::testing::SimDisk disk_{{.total_bytes = 1 << 26}};
  tpusync::testing::GatedFiles gate_{disk_};  // for stores on this disk
  TurnedClock clock_;
  int num_made_ = 0;
};

TEST_F(StackTest, APagePutHereIsADramHitInAnotherProcessAndIsSealedWhereItLands) {
  Process a = make(8, options(), false);
  Process b = make(8, options(), false);
  a.put(0, 4);
  const Stack::Match match = b.stack->match(keys_of(0, 6), {});
  EXPECT_EQ(match.num_pages, 4u);
  EXPECT_EQ(match.num_peer, 4u);
  EXPECT_EQ(b.get(0, 4), 4u);
  EXPECT_EQ(b.stack->match(keys_of(0, 6), {}).num_own, 4u);
  EXPECT_EQ(b.count("tier_get_peer_pages_total"), 4u);
}

TEST_F(StackTest, ADeadPeersPagesAreStillHitsAndADamagedOneIsAMiss) {
  Process b = make(8, options(), false);
  {
    Process a = make(8, options(), false);
    a.put(0, 4);
    a.region->piece(a.region->find(key_of(2))->slot, 0)[5] ^= std::byte{1};
  }
  EXPECT_EQ(b.stack->match(keys_of(0, 4), {}).num_peer, 4u);
  std::vector<Code> outcomes;
  EXPECT_EQ(b.get(0, 4, &outcomes), 2u);
  EXPECT_EQ(outcomes[2], Code::kCorrupt);
  EXPECT_EQ(b.count("tier_get_corrupt_pages_total"), 1u);
}

TEST_F(StackTest, EvictedPagesComeBackFromFlashAndAreSealedAgain) {
  Process a = make(8, options());
  a.put(0, 8);
  ASSERT_TRUE(a.stack->flush(soon()));
  a.put(100, 8);
  Stack::Match match = a.stack->match(keys_of(0, 9), {});
  EXPECT_EQ(match.num_flash, 8u);
  EXPECT_EQ(a.get(0, 8), 8u);
  EXPECT_EQ(a.count("tier_get_flash_pages_total"), 8u);
  EXPECT_EQ(a.stack->match(keys_of(0, 8), {}).num_own, 8u);
}

TEST_F(StackTest, OnePrefixMayBeSpreadOverAllTiers) {
  Process a = make(8, options());
  Process b = make(8, options(), false);
  a.put(0, 8);
  ASSERT_TRUE(a.stack->flush(soon()));
  a.put(100, 8);               // 0 to 7 are on flash only
  EXPECT_EQ(a.get(0, 3), 3u);  // 0 to 2 are own again
  b.put(3, 2, keys_of(0, 3));
  const Stack::Match match = a.stack->match(keys_of(0, 9), {});
  EXPECT_EQ(match.num_own, 3u);
  EXPECT_EQ(match.num_peer, 2u);
  EXPECT_EQ(match.num_flash, 3u);
  EXPECT_EQ(a.get(0, 8), 8u);
}

TEST_F(StackTest, PagesThatAreEvictedNextAreOnFlashBeforeTheirSlotIsUsed) {
  Process a = make(8, options(SpillPolicy::kLazy));
  a.put(0, 8);
  std::vector<bool> there;
  do {
    std::this_thread::yield();
    there = a.store->contains(keys_of(0, 8));
  } while (std::count(there.begin(), there.end(), true) < 4);
  // The deepest are evicted first.
  EXPECT_TRUE(there[7] && there[4]);
  EXPECT_FALSE(there[0]);
}

TEST_F(StackTest, SelectiveSpillsWhatWasAskedForAndNeverSpillsNothing) {
  StackOptions selective = options(SpillPolicy::kSelective);
  selective.spill.num_ahead = 0;
  Process a = make(8, selective);
  a.put(0, 4);
  a.stack->match(keys_of(0, 2), {});
  ASSERT_TRUE(a.stack->flush(soon()));
  EXPECT_EQ(a.store->contains(keys_of(0, 4)), (std::vector<bool>{true, true, false, false}));
  Process b = make(8, options(SpillPolicy::kNever));
  b.put(10, 4);
  ASSERT_TRUE(b.stack->flush(soon()));
  EXPECT_TRUE(b.store->keys().empty());
}

TEST_F(StackTest, AReportedPageIsPinnedUntilItsGetOrUntilItIsTooOld) {
  Process a = make(8, options(), false);
  a.put(0, 4);
  a.put(10, 4);
  a.stack->match(keys_of(0, 4), {});
  EXPECT_EQ(a.count("tier_pinned_pages"), 4u);
  ASSERT_EQ(a.region->alloc(4).size(), 4u);
  EXPECT_EQ(a.region->match(keys_of(0, 4)), 4u) << "the older prefix outlived the younger one";
  clock_.advance(options().pin_lifetime);
  a.stack->match(keys_of(50, 1), {});
  EXPECT_EQ(a.count("tier_pinned_pages"), 0u);
}

TEST_F(StackTest, SoftPinsNeverMakeAnAllocationFail) {
  Process a = make(8, options(), false);
  a.put(0, 8);
  a.stack->match(keys_of(0, 8), {});
  EXPECT_EQ(a.region->num_available(), 8u);
  EXPECT_EQ(a.region->alloc(8).size(), 8u);
  std::vector<std::uint64_t> nothing;
  EXPECT_EQ(a.stack->match(keys_of(0, 8), {}).num_pages, 0u);
}

TEST_F(StackTest, APromiseIsKeptWhateverIsAllocated) {
  Process a = make(8, options());
  a.put(0, 8);
  ASSERT_TRUE(a.stack->flush(soon()));
  a.put(100, 8);
  const auto promised = a.stack->promise(keys_of(0, 6), {}, soon());
  EXPECT_EQ(promised->num_pages(), 6u);
  EXPECT_EQ(a.region->num_available(), 2u);
  EXPECT_TRUE(a.region->alloc(3).empty());
  ASSERT_EQ(a.region->alloc(2).size(), 2u);
  EXPECT_EQ(a.region->match(keys_of(0, 6)), 6u);
}

TEST_F(StackTest, APromiseEndsAtTheFirstPageThatIsNotRight) {
  Process a = make(16, options(SpillPolicy::kNever));
  a.put(0, 6);
  a.region->piece(a.region->find(key_of(3))->slot, 1)[9] ^= std::byte{1};
  const auto promised = a.stack->promise(keys_of(0, 6), {}, soon());
  EXPECT_EQ(promised->num_pages(), 3u);
  EXPECT_TRUE(a.region->consistent());
}

TEST_F(StackTest, APromiseIsNoLongerThanThePool) {
  Process a = make(4, options());
  Process b = make(16, options(), false);
  b.put(0, 10);
  const auto promised = a.stack->promise(keys_of(0, 10), {}, soon());
  EXPECT_EQ(promised->num_pages(), 4u);
}

TEST_F(StackTest, APromiseOverPagesOfSeveralTiersKeepsEachUnderItsAncestors) {
  Process a = make(8, options(), false);
  Process b = make(8, options(), false);
  b.put(0, 4);
  a.put(1, 1, keys_of(0, 1));
  const auto promised = a.stack->promise(keys_of(0, 4), {}, soon());
  EXPECT_EQ(promised->num_pages(), 4u);
  EXPECT_EQ(a.region->path_of(key_of(3)), keys_of(0, 3));
  EXPECT_EQ(a.region->find(key_of(2))->seal.ancestry.depth, 2u);
}

TEST_F(StackTest, AGetWhoseSlotIsFreedAndTakenAgainMeanwhileSealsNothingThere) {
  Process a(dram_.path(), "/store", 8, options(), 4 << 20, gate_);
  a.put(0, 8);
  ASSERT_TRUE(a.stack->flush(soon()));
  a.put(100, 8);  // 0 to 7 are on flash only
  const std::vector<SlotId> all = a.region->alloc(8);
  gate_.close();
  const auto got = a.submit_get(0, std::span(all).first(2));
  ASSERT_TRUE(got);
  gate_.wait_for_readers();
  ASSERT_TRUE(a.region->free(std::span(all).first(1)));
  ASSERT_EQ(a.region->alloc(1), std::vector<SlotId>{all[0]});
  gate_.open();
  ASSERT_TRUE(got->ticket.wait(soon()));
  EXPECT_EQ((*got->outcomes)[0], Code::kOk) << "it was delivered all the same";
  EXPECT_FALSE(a.region->contains(key_of(0)));
  EXPECT_TRUE(a.region->contains(key_of(1)));
  EXPECT_EQ(metrics::value_of(a.region->samples(), "host_seals_cancelled_total"), 1u);
  fill_page(*a.region, all[0], 55);
  EXPECT_EQ(a.stack->put({}, keys_of(55, 1), std::span(all).first(1))[0], Code::kOk);
  PageBuffer buffer(a.region->geometry());
  ASSERT_TRUE(a.region->get(key_of(55), buffer.to(), host::Verify::kAlways));
  EXPECT_TRUE(buffer.is_page(55));
}

TEST_F(StackTest, ClearLeavesNothingOfWhatIsUnderWay) {
  Process a(dram_.path(), "/store", 8, options(), 4 << 20, gate_);
  a.put(0, 8);
  ASSERT_TRUE(a.stack->flush(soon()));
  a.put(100, 8);
  const std::vector<SlotId> slots = a.region->alloc(4);
  gate_.close();
  const auto got = a.submit_get(0, slots);
  ASSERT_TRUE(got);
  gate_.wait_for_readers();
  std::jthread clearing([&] {
    const Stack::Dropped dropped = a.stack->clear();
    EXPECT_EQ(dropped.num_dram, 4u);
  });
  while (a.region->contains(key_of(107)) || a.region->contains(key_of(100))) std::this_thread::yield();
  gate_.open();
  ASSERT_TRUE(got->ticket.wait(soon()));
  clearing.join();
  EXPECT_TRUE(a.region->keys().empty());
  EXPECT_TRUE(a.store->keys().empty());
  a.put(50, 2);
  EXPECT_EQ(a.stack->match(keys_of(50, 2), {}).num_own, 2u);
  EXPECT_TRUE(a.region->consistent());
}

TEST_F(StackTest, RemoveDropsPagesInDramAndOnFlash) {
  Process a = make(8, options());
  a.put(0, 4);
  ASSERT_TRUE(a.stack->flush(soon()));
  const Stack::Dropped dropped = a.stack->remove(keys_of(2, 9));
  EXPECT_EQ(dropped.num_dram, 2u);
  EXPECT_EQ(dropped.num_flash, 2u);
  EXPECT_EQ(a.stack->match(keys_of(0, 4), {}).num_pages, 2u);
}

TEST_F(StackTest, OnceClosedEverythingIsAMissAndNoThreadIsLeft) {
  Process a = make(8, options());
  Process b = make(8, options(), false);
  b.put(20, 1);
  a.put(0, 4);
  EXPECT_EQ(a.stack->match(keys_of(0, 4), {}).num_pages, 4u);
  const auto promised = a.stack->promise(keys_of(0, 2), {}, soon());
  a.stack->close();
  a.stack->close();
  EXPECT_EQ(a.count("tier_pinned_pages"), 0u);
  EXPECT_EQ(a.stack->match(keys_of(0, 4), {}).num_pages, 0u);
  EXPECT_EQ(a.stack->promise(keys_of(0, 4), {}, soon())->num_pages(), 0u);
  EXPECT_EQ(a.stack->clear().num_dram, 0u);
  EXPECT_EQ(a.stack->remove(keys_of(0, 1)).num_dram, 0u);
  EXPECT_TRUE(a.stack->flush({}));
  const std::vector<SlotId> slots = a.region->alloc(2);
  EXPECT_EQ(a.stack->put({}, keys_of(30, 2), slots), (std::vector<Code>(2, Code::kCancelled)));
  const auto got = a.submit_get(20, slots);
  ASSERT_TRUE(got && got->ticket.done());
  EXPECT_EQ(*got->outcomes, (std::vector<Code>(2, Code::kCancelled)));
  EXPECT_EQ(a.region->match(keys_of(0, 4)), 4u);
  EXPECT_TRUE(a.region->alloc(5).empty()) << "the promise holds: two of the four are pinned";
  EXPECT_TRUE(a.region->consistent());
}

TEST_F(StackTest, CloseWaitsForWhatIsUnderWay) {
  Process a(dram_.path(), "/store", 8, options(), 4 << 20, gate_);
  a.put(0, 8);
  ASSERT_TRUE(a.stack->flush(soon()));
  a.put(100, 8);
  const std::vector<SlotId> slots = a.region->alloc(4);
  gate_.close();
  const auto got = a.submit_get(0, slots);
  gate_.wait_for_readers();
  std::jthread closing([&] {
    a.stack->close();
    EXPECT_TRUE(got->ticket.done());
  });
  gate_.open();
  closing.join();
  EXPECT_EQ(*got->outcomes, (std::vector<Code>(4, Code::kOk)));
  for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(a.holds(slots[i], i));
}

TEST_F(StackTest, WhatFlashRefusesAheadOfEvictionIsOfferedLessAndLessOften) {
  StackOptions with = options(SpillPolicy::kLazy);
  with.spill.num_ahead = 4;
  with.spill.offer_again_after = std::chrono::milliseconds(1);
  with.spill.look_ahead_period = std::chrono::milliseconds(1);
  Process a(dram_.path(), "/store", 8, with, 4 << 20, disk_);
  disk_.set_faults({.path_suffix = ".slots", .write_error_1_in = 1});
  const auto look = [&](std::uint64_t times) {
    const std::uint64_t until = a.count("spill_looks_ahead_total") + times;
    while (a.count("spill_looks_ahead_total") < until) std::this_thread::yield();
  };
  a.put(0, 8);
  look(2);
  EXPECT_EQ(a.count("spill_pages_total"), 0u);
  const std::uint64_t num_refused = a.count("spill_pages_refused_total");
  EXPECT_GE(num_refused, 4u);
  look(20);
  EXPECT_EQ(a.count("spill_pages_refused_total"), num_refused) << "nothing has changed";
  clock_.advance(std::chrono::milliseconds(1));
  look(20);
  EXPECT_EQ(a.count("spill_pages_refused_total"), num_refused + 4);
  clock_.advance(std::chrono::milliseconds(1));
  look(20);
  EXPECT_EQ(a.count("spill_pages_refused_total"), num_refused + 4) << "twice as long from time to time";
  disk_.set_faults({});
  clock_.advance(std::chrono::hours(1));
  look(20);
  EXPECT_EQ(a.count("spill_pages_total"), 4u) << "it is never given up";
}

TEST_F(StackTest, APutOfASlotThatIsNotInUseIsRefusedCountedAndNotSpilled) {
  Process a = make(8, options());
  EXPECT_EQ(a.stack->put({}, keys_of(0, 1), std::vector<SlotId>{SlotId{3}})[0], Code::kInvalid);
  EXPECT_EQ(metrics::value_of(a.region->samples(), "host_seals_not_in_use_total"), 1u);
  ASSERT_TRUE(a.stack->flush(soon()));
  EXPECT_EQ(a.count("spill_pages_gone_total"), 0u);
}

TEST_F(StackTest, OptionsOutOfTheirRangeAreNamedWithValueAndRange) {
  const auto region = host::open_region(options_in(dram_.path(), small_geometry(4))).value();
  const auto message = [&](const auto& change) {
    StackOptions with = options();
    change(with);
    const auto stack = Stack::open(with, *region, nullptr);
    return stack ? std::string() : stack.error().message;
  };
  EXPECT_EQ(message([](StackOptions&) {}), "");
  EXPECT_EQ(message([](StackOptions& o) { o.num_copy_threads = 0; }),
            "num_copy_threads: 0, allowed are 1 to 256");
  EXPECT_EQ(message([](StackOptions& o) { o.pin_lifetime = std::chrono::hours(2); }),
            "pin_lifetime_s: 7200, allowed are 0 to 3600");
  EXPECT_EQ(message([](StackOptions& o) { o.promises.recompute_per_page_s = -1; }),
            "recompute_per_page_s: -1, allowed are 0 to 86400");
  EXPECT_NE(message([](StackOptions& o) {
              o.promises = {.enabled = true, .deadline_base_s = 0};
            }).find("deadline_base_s: 0 with deadline_per_page_s 0"),
            std::string::npos);
}

TEST_F(StackTest, AMalformedGetIsRefused) {
  Process a = make(4, options(), false);
  const std::vector<SlotId> slots = a.region->alloc(2);
  const auto get_into = [&](std::vector<SlotId> named, std::span<const SlotId> where) {
    const auto got = a.stack->submit_get({.keys = keys_of(0, named.size()),
                                          .prefix = {},
                                          .addresses = a.addresses_of(where),
                                          .slots = named,
                                          .deadline = {}});
    return got ? Code::kOk : got.error().code;
  };
  EXPECT_EQ(get_into({slots[0], slots[1]}, slots), Code::kOk);
  EXPECT_EQ(get_into({slots[1], slots[0]}, slots), Code::kInvalid) << "addresses elsewhere";
  EXPECT_EQ(get_into({slots[0], slots[0]}, std::vector<SlotId>{slots[0], slots[0]}), Code::kInvalid);
  EXPECT_EQ(get_into({SlotId{3}}, std::vector<SlotId>{SlotId{3}}), Code::kInvalid) << "not in use";
  EXPECT_EQ(get_into({SlotId{4}}, std::vector<SlotId>{SlotId{3}}), Code::kInvalid) << "no slot";
  const std::vector<std::uint64_t> addresses(3);
  EXPECT_EQ(
      a.stack
          ->submit_get(
              {.keys = keys_of(0, 2), .prefix = {}, .addresses = addresses, .slots = {}, .deadline = {}})
          .error()
          .code,
      Code::kInvalid);
}

TEST_F(StackTest, APassedDeadlineIsAMissWithItsName) {
  Process a = make(8, options(), false);
  a.put(0, 2);
  PageBuffer buffer(a.region->geometry());
  std::vector<std::uint64_t> addresses;
  for (std::byte* piece : buffer.to()) addresses.push_back(reinterpret_cast<std::uint64_t>(piece));
  const auto ticket = a.stack->submit_get({.keys = keys_of(0, 1),
                                           .prefix = {},
                                           .addresses = addresses,
                                           .slots = {},
                                           .deadline = std::chrono::steady_clock::now()});
  ASSERT_TRUE(ticket->ticket.wait(soon()));
  EXPECT_EQ((*ticket->outcomes)[0], Code::kDeadline);
}

TEST(Promises, PromisesNoMoreThanTheMeasuredRateDelivers) {
  TurnedClock clock;
  Promises promises({.enabled = true, .deadline_base_s = 1.0, .safety = 1.0}, 1000, clock);
  const std::vector<PageKey> keys = keys_of(0, 10);
  const std::vector<bool> all(10, true);
  EXPECT_EQ(promises.limit(keys, all), 10u) << "nothing is known yet";
  promises.measured(5, std::chrono::seconds(1));  // 5 pages per second
  EXPECT_EQ(promises.limit(keys, all), 5u);
  std::vector<bool> some = all;
  some[0] = some[1] = false;  // in DRAM
  EXPECT_EQ(promises.limit(keys_of(100, 10), some), 7u);
}

TEST(Promises, ADeclinedPageStaysDeclinedForAWhile) {
  TurnedClock clock;
  Promises promises(
      {.enabled = true, .deadline_base_s = 1.0, .safety = 1.0, .sticky = std::chrono::seconds(5)}, 1000,
      clock);
  const std::vector<bool> all(10, true);
  promises.measured(5, std::chrono::seconds(1));
  EXPECT_EQ(promises.limit(keys_of(0, 10), all), 5u);
  for (int i = 0; i < 20; ++i) promises.measured(5000, std::chrono::seconds(1));
  EXPECT_EQ(promises.limit(keys_of(0, 10), all), 5u);
  clock.advance(std::chrono::seconds(6));
  EXPECT_EQ(promises.limit(keys_of(0, 10), all), 10u);
}

TEST(Promises, ALoadThatIsSlowerThanRecomputingIsDeclinedAndItCanBeSwitchedOff) {
  TurnedClock clock;
  const std::vector<bool> all(10, true);
  Promises promises({.enabled = true, .deadline_base_s = 100.0, .recompute_per_page_s = 0.1}, 1000, clock);
  promises.measured(5, std::chrono::seconds(1));
  EXPECT_EQ(promises.limit(keys_of(0, 10), all), 0u);
  Promises off({.enabled = false, .recompute_per_page_s = 0.1}, 1000, clock);
  off.measured(5, std::chrono::seconds(1));
  EXPECT_EQ(off.limit(keys_of(0, 10), all), 10u);
}

}  // namespace
}  // namespace tpusync::tier
