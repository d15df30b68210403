// Totals of a node: capacity, floor, shares, what dead regions give back.
#include "tpusync/flash/node.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdio>
#include <fstream>

#include "tpusync/base/prng.h"
#include "tpusync/flash/flash_store.h"
#include "tpusync/testing/sim_disk.h"
#include "tpusync/testing/store_harness.h"

namespace tpusync::flash {
namespace {

using base::Code;
using testing::count;
using testing::range;
using testing::SimClock;
using testing::SimDisk;
using testing::StoreCalls;

constexpr std::uint64_t kPageBytes = 4096;
constexpr std::uint64_t kCapacity = 100 * kPageBytes;

class NodeTest : public ::testing::Test {
 protected:
  FlashOptions options_of(unsigned name_space) {
    FlashOptions options = testing::small_options("/store", kPageBytes, kCapacity);
    options.name_space[0] = std::byte(name_space);
    options.clock = &clock_;
    options.extent_bytes = 8 * kPageBytes;
    return options;
  }
  std::unique_ptr<FlashStore> open(unsigned name_space) { return open(options_of(name_space)); }
  std::unique_ptr<FlashStore> open(const FlashOptions& options) {
    auto store = FlashStore::open(options, disk_);
    EXPECT_TRUE(store) << store.error().message;
    return std::move(*store);
  }
  static StoreCalls calls(const std::unique_ptr<FlashStore>& store) { return {*store, kPageBytes}; }

  SimClock clock_;
  SimDisk disk_{{.total_bytes = 1 << 24}};
};

TEST_F(NodeTest, RegionsOfOneNodeShareOneCapacity) {
  auto first = open(1);
  auto second = open(2);
  for (std::uint64_t i = 0; i < 30; ++i) {
    calls(first).put(range(i * 10, i * 10 + 10));
    calls(second).put(range(i * 10, i * 10 + 10));
    EXPECT_LE(calls(first).stat("bytes_on_disk"), kCapacity);
  }
  EXPECT_GE(calls(first).stat("entries") + calls(second).stat("entries"), 70u);
}

TEST_F(NodeTest, DiskUseIsWhatItsOwnFilesOccupy) {
  const testing::TempDirectory directory;
  FlashOptions options = testing::small_options(directory.path() + "/store", kPageBytes, kCapacity);
  auto store = FlashStore::open(options).value();
  StoreCalls{*store, kPageBytes}.put(range(0, 50));
  std::ofstream(options.path + "/foreign") << std::string(1 << 20, 'x');
  const std::string command = "du -s -B1 " + options.path + "/v1";
  FILE* const pipe = ::popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  unsigned long long du_bytes = 0;
  EXPECT_EQ(std::fscanf(pipe, "%llu", &du_bytes), 1);
  ::pclose(pipe);
  EXPECT_EQ((StoreCalls{*store, kPageBytes}.stat("bytes_on_disk")), du_bytes);
}

TEST_F(NodeTest, FloorOfFreeSpaceIsLeftToOthers) {
  FlashOptions options = options_of(1);
  options.floor_bytes = 64 * kPageBytes;
  auto store = open(options);
  calls(store).put(range(0, 8));
  disk_.set_available_bytes(64 * kPageBytes + 20 * kPageBytes);
  calls(store).put(range(8, 100));
  EXPECT_GE(disk_.space("/store")->available_bytes, 64 * kPageBytes);
  EXPECT_GE(calls(store).stat("entries"), 16u);
  EXPECT_LE(calls(store).stat("entries"), 28u);
}

TEST_F(NodeTest, BelowTheFloorNothingIsStoredAndRefusalsAreCounted) {
  FlashOptions options = options_of(1);
  options.floor_bytes = 64 * kPageBytes;
  disk_.set_available_bytes(63 * kPageBytes);
  const testing::LogCapture log;
  auto store = open(options);
  EXPECT_EQ(log.count("nothing will be stored"), 1u);
  EXPECT_EQ(count(calls(store).put(range(0, 5)), Code::kExhausted), 5u);
  EXPECT_EQ(calls(store).stat("refused_space"), 5u);
  disk_.set_available_bytes(200 * kPageBytes);
  clock_.advance(std::chrono::seconds(2));
  EXPECT_EQ(count(calls(store).put(range(0, 5)), Code::kOk), 5u) << "space that comes back is used";
}

TEST_F(NodeTest, WhenOthersNeedTheFloorSpaceIsGivenBackByExtents) {
  FlashOptions options = options_of(1);
  options.floor_bytes = 64 * kPageBytes;
  auto store = open(options);
  calls(store).put(range(0, 80));
  const std::uint64_t used = calls(store).stat("bytes_on_disk");
  disk_.set_available_bytes(*options.floor_bytes);
  store->housekeep();
  EXPECT_EQ(calls(store).stat("bytes_on_disk"), used) << "the floor is kept";

  disk_.set_available_bytes(*options.floor_bytes - 20 * kPageBytes);
  store->housekeep();
  EXPECT_LT(calls(store).stat("bytes_on_disk"), used);
  EXPECT_GE(calls(store).stat("bytes_on_disk"), used - 9 * kPageBytes) << "an extent at a time";
  for (int i = 0; i < 10; ++i) store->housekeep();
  EXPECT_GE(disk_.space("/store")->available_bytes, *options.floor_bytes);
  EXPECT_GE(calls(store).stat("bytes_on_disk"), used - 30 * kPageBytes) << "and no more than is missing";
  EXPECT_GT(count(calls(store).get(range(0, 80)), Code::kOk), 40u);
  EXPECT_TRUE(store->consistent());
}

TEST_F(NodeTest, DefaultsAreAFifthOfWhatIsFreeAndAFifthOfTheDisk) {
  FlashOptions options = options_of(1);
  options.capacity_bytes.reset();
  options.floor_bytes.reset();
  options.write_budget_bytes_per_day.reset();
  disk_.set_available_bytes(5 << 20);
  auto store = open(options);
  EXPECT_NEAR(static_cast<double>(calls(store).stat("capacity_bytes")), 1 << 20, 8192);
  EXPECT_EQ(calls(store).stat("floor_bytes"), (1u << 24) / 5);
  EXPECT_EQ(calls(store).stat("write_budget_bytes_per_day"), calls(store).stat("capacity_bytes"));
}

TEST_F(NodeTest, DefaultCapacityCountsWhatTheDirectoryAlreadyHolds) {
  FlashOptions options = options_of(1);
  options.capacity_bytes.reset();
  auto store = open(options);
  const std::uint64_t empty = calls(store).stat("capacity_bytes");
  calls(store).put(range(0, 300));
  store = nullptr;
  store = open(options);
  EXPECT_NEAR(static_cast<double>(calls(store).stat("capacity_bytes")), static_cast<double>(empty), 16384);
}

TEST_F(NodeTest, LoweredCapacityIsMetByGivingExtentsBack) {
  auto store = open(1);
  calls(store).put(range(0, 80));
  store.reset();
  FlashOptions options = options_of(1);
  options.capacity_bytes = 40 * kPageBytes;
  store = open(options);
  EXPECT_LE(calls(store).stat("bytes_on_disk"), 40 * kPageBytes);
  EXPECT_GE(calls(store).stat("entries"), 20u);
  const std::size_t num_entries = store->keys().size();
  EXPECT_EQ(count(calls(store).get(range(0, 80)), Code::kOk), num_entries);
  EXPECT_TRUE(store->consistent());
  calls(store).put(range(100, 130));
  EXPECT_LE(calls(store).stat("bytes_on_disk"), 40 * kPageBytes);
}

TEST_F(NodeTest, DeadRegionsOfOtherNamespacesAreReclaimedOldestFirst) {
  for (const unsigned name_space : {1u, 2u}) {
    auto dead = open(name_space);
    calls(dead).put(range(0, 40));
  }
  auto store = open(3);
  EXPECT_GT(count(calls(store).put(range(0, 30)), Code::kOk), 20u);
  EXPECT_EQ(calls(store).stat("regions_reclaimed"), 1u);
  EXPECT_LE(calls(store).stat("bytes_on_disk"), kCapacity);
  store.reset();
  EXPECT_EQ(open(1)->keys().size(), 0u);
  EXPECT_GT(open(2)->keys().size(), 0u);
}

TEST_F(NodeTest, LiveRegionsAreNeverReclaimed) {
  auto first = open(1);
  calls(first).put(range(0, 100));
  const std::size_t num_entries = first->keys().size();
  auto second = open(2);
  calls(second).put(range(0, 10));
  EXPECT_EQ(count(calls(first).get(range(0, 100)), Code::kOk), num_entries);
}

TEST_F(NodeTest, LateComerGetsItsShareOfAFullNode) {
  auto first = open(1);
  calls(first).put(range(0, 100));
  auto second = open(2);
  for (int i = 0; i < 40; ++i) {
    calls(second).put(range(0, 60));
    first->housekeep();
    second->housekeep();
    clock_.advance(std::chrono::seconds(2));
    calls(first).put(range(1000 + i * 10, 1010 + i * 10));
  }
  EXPECT_GE(calls(second).stat("slots"), 35u);
  EXPECT_GE(calls(first).stat("slots"), 35u);
  EXPECT_LE(calls(first).stat("bytes_on_disk"), kCapacity);
  EXPECT_TRUE(first->consistent());
  EXPECT_TRUE(second->consistent());
}

TEST_F(NodeTest, WriteBudgetIsOneForAllProcesses) {
  FlashOptions first_options = options_of(1);
  FlashOptions second_options = options_of(2);
  first_options.write_budget_bytes_per_day = second_options.write_budget_bytes_per_day = 20 * kPageBytes;
  auto first = open(first_options);
  auto second = open(second_options);
  const std::size_t num_stored =
      count(calls(first).put(range(0, 15)), Code::kOk) + count(calls(second).put(range(0, 15)), Code::kOk);
  EXPECT_EQ(num_stored, 20u);
}

TEST_F(NodeTest, TornLedgerStartsOverAndIsCounted) {
  FlashOptions options = options_of(1);
  options.write_budget_bytes_per_day = 20 * kPageBytes;
  auto store = open(options);
  calls(store).put(range(0, 20));
  disk_.flip("/store/v1/ledger", 20, std::byte{1});
  clock_.advance(std::chrono::seconds(1));
  EXPECT_EQ(count(calls(store).put(range(20, 30)), Code::kOk), 10u);
  EXPECT_EQ(calls(store).stat("ledger_resets"), 1u);
}

}  // namespace
}  // namespace tpusync::flash
