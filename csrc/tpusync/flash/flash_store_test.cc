// The conformance suite of a store, run on every kind of disk and engine.
#include "tpusync/flash/flash_store.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>

#include "tpusync/testing/sim_disk.h"
#include "tpusync/testing/store_harness.h"

namespace tpusync::flash {
namespace {

using base::Code;
using testing::count;
using testing::range;

constexpr std::uint64_t kPageBytes = 4096;

struct Backend {
  std::string name;
  bool simulated = false;
  IoKind io = IoKind::kThreads;
  std::uint64_t page_bytes = kPageBytes;
  std::size_t num_pieces = 1;
  std::size_t misalign_bytes = 0;
};

void PrintTo(const Backend& backend, std::ostream* out) {
  *out << backend.name;
}

class Store : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    if (GetParam().simulated)
      sim_ = std::make_unique<testing::SimDisk>(testing::SimDisk::Options{.direct_align_bytes = 512});
    options_ = testing::small_options(sim_ ? "/store" : directory_.path() + "/store", page_bytes());
    options_.capacity_bytes = 64 * base::round_up(page_bytes(), kSlotAlignBytes) + 64 * base::kKiB;
    options_.io = GetParam().io;
    if (options_.io == IoKind::kUring && !has_uring()) GTEST_SKIP() << "this kernel or build has no io_uring";
    reopen();
  }

  bool has_uring() {
    auto file = files().open(directory_.path() + "/probe", {.create = true});
    return file && make_uring_engine(**file);
  }

  std::uint64_t page_bytes() const { return GetParam().page_bytes; }
  os::FileSystem& files() { return sim_ ? static_cast<os::FileSystem&>(*sim_) : os::posix_file_system(); }

  void reopen() {
    store_.reset();
    auto opened = FlashStore::open(options_, files());
    ASSERT_TRUE(opened) << opened.error().message;
    store_ = std::move(*opened);
  }

  testing::StoreCalls calls() {
    return {*store_, page_bytes(), GetParam().num_pieces, GetParam().misalign_bytes};
  }

  testing::TempDirectory directory_;
  std::unique_ptr<testing::SimDisk> sim_;
  FlashOptions options_;
  std::unique_ptr<FlashStore> store_;
};

TEST_P(Store, GetAnswersWhatWasPut) {
  EXPECT_EQ(count(calls().put(range(0, 20)), Code::kOk), 20u);
  EXPECT_EQ(count(calls().get(range(0, 20)), Code::kOk), 20u);
  EXPECT_EQ(calls().stat("put_bytes"), 20 * page_bytes());
  EXPECT_EQ(calls().stat("get_bytes"), 20 * page_bytes());
  EXPECT_TRUE(store_->consistent());
}

TEST_P(Store, UnknownPagesAreMissesBesideHits) {
  calls().put(range(0, 3));
  const auto outcomes = calls().get(range(1, 6));
  EXPECT_EQ(outcomes, (std::vector{Code::kOk, Code::kOk, Code::kNotFound, Code::kNotFound, Code::kNotFound}));
  EXPECT_EQ(calls().stat("misses"), 3u);
}

TEST_P(Store, PutOfAStoredPageWritesNothing) {
  calls().put(range(0, 4));
  const auto written = calls().stat("put_bytes");
  EXPECT_EQ(count(calls().put(range(0, 4)), Code::kOk), 4u);
  EXPECT_EQ(calls().stat("put_bytes"), written);
  EXPECT_EQ(calls().stat("puts_present"), 4u);
}

TEST_P(Store, OneKeyTwiceInABatchIsStoredOnce) {
  EXPECT_EQ(count(calls().put(std::vector<std::uint64_t>(8, 5)), Code::kOk), 8u);
  EXPECT_EQ(calls().stat("entries"), 1u);
  EXPECT_EQ(count(calls().get(range(5, 6)), Code::kOk), 1u);
  EXPECT_TRUE(store_->consistent());
}

TEST_P(Store, MatchAnswersTheLongestStoredPrefix) {
  calls().put(range(0, 8));
  EXPECT_EQ(store_->match(testing::keys_of(range(0, 12)), {}), 8u);
  const auto key = testing::keys_of(range(3, 4));
  EXPECT_EQ(store_->remove(key), 1u);
  EXPECT_EQ(store_->match(testing::keys_of(range(0, 12)), {}), 3u);
  EXPECT_EQ(store_->match({}, {}), 0u);
}

TEST_P(Store, ReopenFindsEverything) {
  calls().put(range(0, 30));
  reopen();
  EXPECT_EQ(calls().stat("recovered_entries"), 30u);
  EXPECT_EQ(count(calls().get(range(0, 30)), Code::kOk), 30u);
  EXPECT_EQ(calls().stat("corrupt"), 0u);
}

TEST_P(Store, RemovedAndClearedPagesStayGoneAfterReopen) {
  calls().put(range(0, 30));
  EXPECT_EQ(store_->remove(testing::keys_of(range(0, 10))), 10u);
  reopen();
  EXPECT_EQ(calls().stat("entries"), 20u);
  EXPECT_EQ(store_->clear(), 20u);
  EXPECT_EQ(calls().stat("entries"), 0u);
  reopen();
  EXPECT_EQ(calls().stat("entries"), 0u);
  EXPECT_EQ(count(calls().put(range(0, 5)), Code::kOk), 5u);
}

TEST_P(Store, AtCapacityTheLeastRecentlyUsedGoAndDiskUseStaysBelow) {
  for (std::uint64_t i = 0; i < 20; ++i) {
    EXPECT_EQ(count(calls().put(range(i * 10, i * 10 + 10)), Code::kOk), 10u);
  }
  EXPECT_GT(calls().stat("evicted"), 0u);
  EXPECT_LE(calls().stat("bytes_on_disk"), *options_.capacity_bytes);
  EXPECT_GE(calls().stat("entries"), 60u);
  EXPECT_EQ(count(calls().get(range(150, 200)), Code::kOk), 50u);
  EXPECT_FALSE(calls().has(0));
  EXPECT_TRUE(store_->consistent());
}

TEST_P(Store, EvictionTakesLeavesBeforeTheirPrefix) {
  const auto prefix = range(0, 10);
  calls().put(prefix);
  calls().put(range(10, 50), prefix);
  calls().put(range(1000, 1030));
  const auto keys = testing::keys_of(range(0, 50));
  const std::size_t num_left = store_->match(keys, {});
  EXPECT_GE(num_left, 10u);
  EXPECT_LT(num_left, 50u);
  for (std::uint64_t i = num_left; i < 50; ++i) EXPECT_FALSE(calls().has(i)) << i;
}

TEST_P(Store, AncestorsNamedByALookupStayYoung) {
  const auto head = range(0, 5);
  calls().put(head);
  for (std::uint64_t i = 0; i < 40; ++i) {
    calls().put(range(100 + i * 5, 105 + i * 5), head);
  }
  EXPECT_EQ(store_->match(testing::keys_of(head), {}), 5u);
}

TEST_P(Store, OrderOfEvictionSurvivesReopen) {
  const auto head = range(0, 10);
  calls().put(head);
  calls().put(range(10, 60), head);
  reopen();
  calls().put(range(1000, 1040));
  const std::size_t num_left = store_->match(testing::keys_of(range(0, 60)), {});
  EXPECT_GE(num_left, 10u);
  for (std::uint64_t i = num_left; i < 60; ++i) EXPECT_FALSE(calls().has(i)) << i;
}

TEST_P(Store, KeysAnswersTheMostRecentFirst) {
  calls().put(range(0, 1));
  calls().put(range(1, 2));
  calls().put(range(2, 3));
  store_->match(testing::keys_of(range(0, 1)), {});
  EXPECT_EQ(store_->keys(), testing::keys_of(std::vector<std::uint64_t>{0, 2, 1}));
}

TEST_P(Store, PassedDeadlineTouchesNoMemory) {
  calls().put(range(0, 4));
  testing::PageMemory memory(4, page_bytes());
  for (std::size_t i = 0; i < 4; ++i) std::ranges::fill(memory.page(i), std::byte{0x5a});
  const auto keys = testing::keys_of(range(0, 4));
  const auto late = std::chrono::steady_clock::now() - std::chrono::seconds(1);
  const auto batch = store_->submit_get({.keys = keys,
                                         .prefix = {},
                                         .addresses = memory.addresses(),
                                         .lengths = memory.lengths(),
                                         .deadline = late});
  batch->ticket.wait();
  EXPECT_EQ(count(*batch->outcomes, Code::kDeadline), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    for (const std::byte b : memory.page(i)) ASSERT_EQ(b, std::byte{0x5a});
  }
  EXPECT_EQ(count(calls().get(range(0, 4)), Code::kOk), 4u);
  EXPECT_TRUE(store_->consistent());
}

TEST_P(Store, MalformedBatchesAreRefusedWithTheirNumbers) {
  testing::PageMemory memory(2, page_bytes());
  const auto keys = testing::keys_of(range(0, 2));
  const std::vector<std::uint64_t> short_lengths = {page_bytes() - 1};
  EXPECT_EQ(store_
                ->submit_put(
                    {.keys = keys, .prefix = {}, .addresses = memory.addresses(), .lengths = short_lengths})
                .error()
                .code,
            Code::kInvalid);
  EXPECT_EQ(store_
                ->submit_put({.keys = std::span(keys).first(1),
                              .prefix = {},
                              .addresses = memory.addresses(),
                              .lengths = memory.lengths()})
                .error()
                .code,
            Code::kInvalid);
  const std::vector<std::uint64_t> null_addresses = {0, 0};
  EXPECT_EQ(
      store_
          ->submit_get({.keys = keys, .prefix = {}, .addresses = null_addresses, .lengths = memory.lengths()})
          .error()
          .code,
      Code::kInvalid);
  const std::vector<std::uint64_t> huge = {~std::uint64_t{0}, page_bytes() + 1};
  const std::vector<std::uint64_t> addresses(4, memory.addresses()[0]);
  EXPECT_EQ(
      store_->submit_put({.keys = keys, .prefix = {}, .addresses = addresses, .lengths = huge}).error().code,
      Code::kInvalid);
}

TEST_P(Store, EmptyBatchIsDoneAtOnce) {
  testing::PageMemory memory(1, page_bytes());
  const auto batch =
      store_->submit_put({.keys = {}, .prefix = {}, .addresses = {}, .lengths = memory.lengths()});
  EXPECT_TRUE(batch->ticket.done());
  EXPECT_TRUE(batch->outcomes->empty());
}

TEST_P(Store, AfterCloseCallsFindNothing) {
  calls().put(range(0, 3));
  store_->close();
  EXPECT_EQ(count(calls().put(range(3, 5)), Code::kCancelled), 2u);
  EXPECT_EQ(count(calls().get(range(0, 3)), Code::kCancelled), 3u);
  EXPECT_EQ(store_->match(testing::keys_of(range(0, 3)), {}), 0u);
  EXPECT_TRUE(store_->flush({}));
  store_->close();
  reopen();
  EXPECT_EQ(calls().stat("entries"), 3u);
}

TEST_P(Store, EveryFsyncPolicyStoresAndFlushes) {
  for (const FsyncPolicy policy : {FsyncPolicy::kInterval, FsyncPolicy::kAlways}) {
    options_.fsync = policy;
    reopen();
    const std::uint64_t base = policy == FsyncPolicy::kAlways ? 100 : 200;
    EXPECT_EQ(count(calls().put(range(base, base + 10)), Code::kOk), 10u);
    store_->housekeep();
    EXPECT_TRUE(store_->flush({}));
    EXPECT_EQ(count(calls().get(range(base, base + 10)), Code::kOk), 10u);
  }
}

TEST_P(Store, SpentWriteBudgetRefusesAndReadsGoOn) {
  testing::SimClock clock;
  store_.reset();
  options_.clock = &clock;
  options_.write_budget_bytes_per_day = 10 * base::round_up(page_bytes(), kSlotAlignBytes);
  reopen();
  EXPECT_EQ(count(calls().put(range(0, 15)), Code::kOk), 10u);
  EXPECT_EQ(calls().stat("refused_budget"), 5u);
  std::size_t num_hits = count(calls().get(range(0, 15)), Code::kOk);
  EXPECT_EQ(num_hits, 10u);
  clock.advance(std::chrono::hours(12));
  EXPECT_EQ(count(calls().put(range(20, 30)), Code::kOk), 5u);
  reopen();
  EXPECT_EQ(count(calls().put(range(40, 50)), Code::kOk), 0u) << "a restart is no new budget";
  store_.reset();
  options_.clock = nullptr;
}

TEST_P(Store, ManyThreadsNeverSeeWrongBytes) {
  constexpr int kNumThreads = 4;
  std::atomic<int> num_wrong = 0;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < kNumThreads; ++t) {
      threads.emplace_back([&, t] {
        base::Prng prng(static_cast<std::uint64_t>(t));
        for (int i = 0; i < 60; ++i) {
          const std::uint64_t first = prng.below(120);
          const auto numbers = range(first, first + 1 + prng.below(16));
          switch (prng.below(6)) {
            case 0:
              store_->remove(testing::keys_of(numbers));
              break;
            case 1:
              store_->match(testing::keys_of(numbers), {});
              break;
            case 2:
            case 3:
              num_wrong += static_cast<int>(count(calls().get(numbers), Code::kUnsupported));
              break;
            default:
              calls().put(numbers);
              break;
          }
          if (prng.one_in(40)) store_->clear();
        }
      });
    }
  }
  EXPECT_EQ(num_wrong, 0);
  EXPECT_EQ(calls().stat("corrupt"), 0u);
  EXPECT_TRUE(store_->consistent());
  const auto num_entries = calls().stat("entries");
  reopen();
  EXPECT_EQ(calls().stat("entries"), num_entries);
  EXPECT_EQ(calls().stat("corrupt"), 0u);
}

INSTANTIATE_TEST_SUITE_P(
    Backends, Store,
    ::testing::Values(
        Backend{.name = "Threads"}, Backend{.name = "Buffered", .io = IoKind::kBuffered},
        Backend{.name = "Auto", .io = IoKind::kAuto},
        Backend{.name = "ThreadsBounced", .num_pieces = 3, .misalign_bytes = 8},
        Backend{.name = "ThreadsOddPages", .page_bytes = 9001, .num_pieces = 2},
        Backend{.name = "Uring", .io = IoKind::kUring},
        Backend{.name = "UringBounced", .io = IoKind::kUring, .num_pieces = 2, .misalign_bytes = 16},
        Backend{.name = "TinyPages", .page_bytes = 1}, Backend{.name = "SimDisk", .simulated = true},
        Backend{.name = "SimDiskBounced", .simulated = true, .num_pieces = 3, .misalign_bytes = 1},
        Backend{.name = "TwoPieces", .page_bytes = 65536, .num_pieces = 2}),
    [](const auto& backend) { return backend.param.name; });

}  // namespace
}  // namespace tpusync::flash
