// Disks that tear, rot, misdirect, fill up and fail: never a wrong byte, and nothing lost but what was
// damaged.
#include <gtest/gtest.h>

#include "tpusync/base/prng.h"
#include "tpusync/flash/flash_store.h"
#include "tpusync/testing/sim_disk.h"
#include "tpusync/testing/store_harness.h"

namespace tpusync::flash {
namespace {

using base::Code;
using testing::count;
using testing::range;
using testing::SimDisk;
using testing::SimFaults;
using testing::StoreCalls;

constexpr std::uint64_t kPageBytes = 4096;

struct FaultCase {
  std::string name;
  SimFaults faults;
};
void PrintTo(const FaultCase& fault_case, std::ostream* out) {
  *out << fault_case.name;
}

class FaultyDisk : public ::testing::TestWithParam<FaultCase> {};

// Random work on a failing disk, with reopens in between.
TEST_P(FaultyDisk, NeverAnswersWrongBytes) {
  const testing::LogCapture log;
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    SimDisk disk({.seed = seed, .total_bytes = 1 << 24});
    FlashOptions options = testing::small_options("/store", kPageBytes, 60 * kPageBytes);
    base::Prng prng(seed);
    for (int round = 0; round < 4; ++round) {
      disk.set_faults({});
      auto store = FlashStore::open(options, disk);
      ASSERT_TRUE(store) << store.error().message;
      disk.set_faults(GetParam().faults);
      const StoreCalls calls{**store, kPageBytes};
      for (int i = 0; i < 30; ++i) {
        const std::uint64_t first = prng.below(100);
        const auto numbers = range(first, first + 1 + prng.below(10));
        if (prng.one_in(2)) {
          calls.put(numbers);
        } else {
          ASSERT_EQ(count(calls.get(numbers), Code::kUnsupported), 0u)
              << "seed " << seed << " round " << round;
        }
      }
      EXPECT_TRUE((*store)->consistent());
    }
    EXPECT_GT(disk.num_faults(), 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Faults, FaultyDisk,
    ::testing::Values(FaultCase{"TornSlots", {.path_suffix = ".slots", .torn_write_1_in = 5}},
                      FaultCase{"TornRecords", {.path_suffix = ".table", .torn_write_1_in = 5}},
                      FaultCase{"MisdirectedSlots", {.path_suffix = ".slots", .misdirected_write_1_in = 5}},
                      FaultCase{"MisdirectedRecords", {.path_suffix = ".table", .misdirected_write_1_in = 5}},
                      FaultCase{"RottenSlots", {.path_suffix = ".slots", .bit_rot_1_in = 5}},
                      FaultCase{"FailingReads", {.path_suffix = ".slots", .read_error_1_in = 5}},
                      FaultCase{"FailingWrites", {.path_suffix = "", .write_error_1_in = 5}}),
    [](const auto& fault_case) { return fault_case.param.name; });

class Fault : public ::testing::Test {
 protected:
  void open(FsyncPolicy fsync = FsyncPolicy::kNone, std::optional<std::chrono::seconds> ttl = std::nullopt) {
    FlashOptions options = testing::small_options("/store", kPageBytes, 60 * kPageBytes);
    options.clock = &clock_;
    options.fsync = fsync;
    options.ttl = ttl;
    options.latency_budget = kBudget;
    store_.reset();
    store_ = FlashStore::open(options, latency_turns_the_clock_ ? clocked_disk_ : disk_).value();
  }
  StoreCalls calls() { return {*store_, kPageBytes}; }

  static constexpr std::chrono::milliseconds kBudget{500};
  const testing::LogCapture log;
  testing::SimClock clock_;
  SimDisk disk_{{.total_bytes = 1 << 22}};
  bool latency_turns_the_clock_ = false;
  SimDisk clocked_disk_{{.total_bytes = 1 << 22, .clock = &clock_}};
  std::unique_ptr<FlashStore> store_;
};

TEST_F(Fault, FailedReadDropsTheEntryOnce) {
  open();
  calls().put(range(0, 4));
  disk_.set_faults({.path_suffix = ".slots", .read_error_1_in = 1});
  EXPECT_EQ(count(calls().get(range(0, 1)), Code::kIo), 1u);
  disk_.set_faults({});
  EXPECT_EQ(count(calls().get(range(0, 1)), Code::kNotFound), 1u);
  EXPECT_EQ(count(calls().get(range(1, 4)), Code::kOk), 3u);
  EXPECT_EQ(calls().stat("io_errors"), 1u);
  open();
  EXPECT_EQ(calls().stat("entries"), 3u) << "the dropped entry must not come back";
}

TEST_F(Fault, DamagedPageIsAMissCountedEachTimeAndLoggedOnce) {
  open();
  calls().put(range(0, 4));
  const std::string slots =
      StorePath{"/store"}.name_space(testing::small_options("/store").name_space) + "/region-000.slots";
  disk_.flip(slots, 10, std::byte{1});
  disk_.flip(slots, kPageBytes + 10, std::byte{1});
  EXPECT_EQ(count(calls().get(range(0, 4)), Code::kCorrupt), 2u);
  EXPECT_EQ(log.count("does not hold what was written"), 1u);
  EXPECT_EQ(calls().stat("corrupt"), 2u);
  EXPECT_EQ(calls().stat("entries"), 2u);
  EXPECT_EQ(count(calls().put(range(0, 4)), Code::kOk), 4u);
  EXPECT_EQ(count(calls().get(range(0, 4)), Code::kOk), 4u) << "a dropped page can be stored again";
}

TEST_F(Fault, FullDiskRefusesWritesAndKeepsWhatIsThere) {
  open();
  calls().put(range(0, 7));
  disk_.set_available_bytes(0);
  const auto outcomes = calls().put(range(100, 140));
  EXPECT_EQ(count(outcomes, Code::kOk) + count(outcomes, Code::kExhausted), 40u);
  EXPECT_GT(count(calls().get(range(100, 140)), Code::kOk), 0u) << "own slots are reused";
  EXPECT_EQ(calls().stat("corrupt"), 0u);
  EXPECT_TRUE(store_->consistent());
}

TEST_F(Fault, ABadBlockCostsItsPageAndNotThoseReadWithIt) {
  open();
  EXPECT_EQ(count(calls().put(range(0, 40)), Code::kOk), 40u);
  disk_.set_faults({.path_suffix = ".slots", .bad_blocks = {3, 21}});
  const std::vector<Code> outcomes = calls().get(range(0, 40));
  EXPECT_EQ(count(outcomes, Code::kOk), 38u);
  EXPECT_EQ(count(outcomes, Code::kIo), 2u);
  EXPECT_GT(disk_.num_faults(), 2u);  // whole stretches failed first
  EXPECT_EQ(store_->keys().size(), 38u);
  EXPECT_TRUE(store_->consistent());
}

TEST_F(Fault, ASlowDiskIsLeftAloneUntilItIsFastAgain) {
  latency_turns_the_clock_ = true;
  open();
  EXPECT_EQ(count(calls().put(range(0, 40)), Code::kOk), 40u);
  const auto keys = testing::keys_of(range(0, 8));
  EXPECT_EQ(store_->match(keys, {}), 8u);

  clocked_disk_.set_faults({.path_suffix = ".slots", .latency = 2 * kBudget});
  for (std::uint64_t i = 0; i < Breaker::kNumFailures; ++i) {
    EXPECT_EQ(count(calls().get(range(i, i + 1)), Code::kOk), 1u) << "slow is not wrong";
  }
  EXPECT_EQ(calls().stat("read_breaker_open"), 1u);
  EXPECT_EQ(store_->match(keys, {}), 0u) << "a hit would be slower than none";
  EXPECT_EQ(calls().stat("match_declined"), 8u);
  for (std::uint64_t i = 0; i < Breaker::kNumFailures; ++i) {
    EXPECT_EQ(count(calls().put(range(100 + i, 101 + i)), Code::kOk), 1u);
  }
  EXPECT_EQ(calls().stat("breaker_open"), 1u);
  EXPECT_EQ(count(calls().put(range(200, 210)), Code::kExhausted), 10u);

  clocked_disk_.set_faults({});
  clock_.advance(Breaker::kPauseMax);
  EXPECT_EQ(store_->match(keys, {}), 8u) << "the probe";
  EXPECT_EQ(store_->match(keys, {}), 0u) << "only one until its outcome is known";
  EXPECT_EQ(count(calls().get(range(0, 8)), Code::kOk), 8u);
  EXPECT_EQ(store_->match(keys, {}), 8u);
  EXPECT_GT(count(calls().put(range(210, 220)), Code::kOk), 0u);
  EXPECT_EQ(count(calls().put(range(220, 230)), Code::kOk), 10u);
  EXPECT_EQ(calls().stat("breaker_open") + calls().stat("read_breaker_open"), 0u);
  EXPECT_TRUE(store_->consistent());
}

TEST_F(Fault, PagesAreMissesOnceTheyHaveOutlivedTheirTime) {
  using std::chrono::hours;
  open(FsyncPolicy::kNone, hours(2));
  calls().put(range(0, 10));
  clock_.advance(hours(1));
  calls().put(range(10, 20));
  EXPECT_EQ(count(calls().get(range(0, 20)), Code::kOk), 20u);
  clock_.advance(std::chrono::minutes(90));
  EXPECT_EQ(store_->match(testing::keys_of(range(0, 4)), {}), 0u);
  EXPECT_EQ(count(calls().get(range(4, 8)), Code::kNotFound), 4u);
  EXPECT_EQ(calls().stat("outlived"), 8u);
  EXPECT_EQ(count(calls().put(range(0, 2)), Code::kOk), 2u) << "stored anew";
  store_->housekeep();
  EXPECT_EQ(calls().stat("outlived"), 10u);
  EXPECT_EQ(store_->keys().size(), 12u);
  open(FsyncPolicy::kNone, hours(2));
  EXPECT_EQ(count(calls().get(range(0, 2)), Code::kOk), 2u) << "the time of writing is on the disk";
  EXPECT_EQ(count(calls().get(range(10, 20)), Code::kOk), 10u);
  clock_.advance(hours(1));
  open(FsyncPolicy::kNone, hours(2));
  EXPECT_EQ(store_->keys().size(), 2u) << "opening sweeps";
  EXPECT_TRUE(store_->consistent());
}

TEST_F(Fault, ReadOnlyRemountRefusesWritesAndReadsGoOn) {
  open();
  calls().put(range(0, 20));
  disk_.set_read_only(true);
  EXPECT_EQ(count(calls().put(range(20, 60)), Code::kOk), 0u);
  EXPECT_GT(calls().stat("io_errors"), 0u);
  EXPECT_EQ(calls().stat("breaker_open"), 1u);
  EXPECT_EQ(count(calls().put(range(60, 70)), Code::kOk), 0u);
  EXPECT_EQ(calls().stat("refused_breaker"), 10u);
  const std::size_t num_left = store_->keys().size();
  EXPECT_EQ(count(calls().get(range(0, 20)), Code::kOk), num_left);
  disk_.set_read_only(false);
  clock_.advance(Breaker::kPauseMax);
  EXPECT_GT(count(calls().put(range(20, 30)), Code::kOk), 0u);
  EXPECT_EQ(calls().stat("breaker_open"), 0u);
  EXPECT_TRUE(store_->consistent());
}

TEST_F(Fault, CancelledBatchStopsAndEveryTicketResolves) {
  open();
  disk_.set_faults({.path_suffix = ".slots", .latency = std::chrono::milliseconds(300)});
  testing::PageMemory memory(10, kPageBytes);
  std::vector<BatchTicket> batches;
  for (std::uint64_t i = 0; i < 4; ++i) {  // two threads write: the last two batches wait
    const auto keys = testing::keys_of(range(i * 10, i * 10 + 10));
    batches.push_back(
        store_->submit_put({.keys = keys, .addresses = memory.addresses(), .lengths = memory.lengths()})
            .value());
  }
  for (const BatchTicket& batch : batches) batch.ticket.cancel();
  std::size_t num_cancelled = 0;
  for (const BatchTicket& batch : batches) {
    batch.ticket.wait();
    num_cancelled += count(*batch.outcomes, Code::kCancelled);
    EXPECT_EQ(count(*batch.outcomes, Code::kCancelled) + count(*batch.outcomes, Code::kOk), 10u);
  }
  EXPECT_GE(num_cancelled, 20u);
  EXPECT_TRUE(store_->consistent());
}

TEST_F(Fault, ReadsDoNotWaitBehindWrites) {
  open();
  calls().put(range(0, 4));
  disk_.set_faults({.path_suffix = ".table", .latency = std::chrono::milliseconds(500)});
  testing::PageMemory memory(40, kPageBytes);
  const auto keys = testing::keys_of(range(100, 140));
  const auto writes =
      store_->submit_put({.keys = keys, .addresses = memory.addresses(), .lengths = memory.lengths()})
          .value();
  EXPECT_EQ(count(calls().get(range(0, 4)), Code::kOk), 4u);
  EXPECT_FALSE(writes.ticket.done());
  writes.ticket.wait();
}

TEST_F(Fault, CloseResolvesEveryTicket) {
  open();
  disk_.set_faults({.path_suffix = ".slots", .latency = std::chrono::milliseconds(2)});
  testing::PageMemory memory(50, kPageBytes);
  const auto keys = testing::keys_of(range(0, 50));
  std::vector<BatchTicket> batches;
  for (int i = 0; i < 5; ++i) {
    batches.push_back(
        store_->submit_put({.keys = keys, .addresses = memory.addresses(), .lengths = memory.lengths()})
            .value());
  }
  store_->close();
  for (const BatchTicket& batch : batches) EXPECT_TRUE(batch.ticket.done());
}

TEST_F(Fault, FlushGivesUpAtItsDeadlineAndSucceedsLater) {
  open(FsyncPolicy::kInterval);
  disk_.set_faults({.path_suffix = ".slots", .latency = std::chrono::milliseconds(300)});
  testing::PageMemory memory(8, kPageBytes);
  const auto keys = testing::keys_of(range(0, 8));
  const auto batch =
      store_->submit_put({.keys = keys, .addresses = memory.addresses(), .lengths = memory.lengths()})
          .value();
  EXPECT_FALSE(store_->flush(std::chrono::steady_clock::now()));
  EXPECT_TRUE(store_->flush({}));
  EXPECT_TRUE(batch.ticket.done());
}

}  // namespace
}  // namespace tpusync::flash
