// Power cuts: of what was not synced each write survives whole, in part, or not, in any combination.
// TPUSYNC_TEST_ROUNDS and TPUSYNC_TEST_SEED make a campaign of it.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <set>

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
using testing::StoreCalls;

constexpr std::uint64_t kPageBytes = 4096;
constexpr std::uint64_t kNumPages = 60;  // that fit

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

class PowerCut : public ::testing::TestWithParam<FsyncPolicy> {
 protected:
  void open() {
    FlashOptions options = testing::small_options("/store", kPageBytes, kNumPages * kPageBytes);
    options.clock = &clock_;
    options.fsync = GetParam();
    store_.reset();
    auto opened = FlashStore::open(options, disk_);
    ASSERT_TRUE(opened) << opened.error().message;
    store_ = std::move(*opened);
  }
  void cut() {
    store_.reset();
    disk_.power_cut();
    open();
  }
  StoreCalls calls() { return {*store_, kPageBytes}; }

  const std::uint64_t rounds_ = from_environment("TPUSYNC_TEST_ROUNDS", 20);
  const std::uint64_t seed_ = from_environment("TPUSYNC_TEST_SEED", 1);
  const testing::LogCapture log_;
  testing::SimClock clock_;
  SimDisk disk_{{.seed = seed_, .total_bytes = 1 << 22}};
  std::unique_ptr<FlashStore> store_;
};

// Acknowledged, and on the medium according to the policy: still there. Removed and synced: still gone.
TEST_P(PowerCut, KeepsWhatThePolicyPromises) {
  base::Prng prng(seed_);
  for (std::uint64_t round = 0; round < rounds_; ++round) {
    open();
    store_->clear();
    std::set<std::uint64_t> acknowledged;
    std::set<std::uint64_t> promised;
    std::uint64_t next = round * 1000;
    while (acknowledged.size() < kNumPages / 2 && !prng.one_in(8)) {
      const auto numbers = range(next, next + 1 + prng.below(9));
      next += numbers.size();
      EXPECT_EQ(count(calls().put(numbers), Code::kOk), numbers.size());
      acknowledged.insert(numbers.begin(), numbers.end());
      if (prng.one_in(3)) {
        store_->housekeep();
        if (GetParam() == FsyncPolicy::kInterval) promised = acknowledged;
      }
      if (GetParam() == FsyncPolicy::kAlways) promised = acknowledged;
    }
    cut();
    for (const std::uint64_t number : acknowledged) {
      const Code outcome = calls().get(range(number, number + 1)).front();
      EXPECT_NE(outcome, Code::kUnsupported) << "wrong bytes of page " << number << ", round " << round;
      if (promised.count(number) > 0) {
        EXPECT_EQ(outcome, Code::kOk) << number << ", round " << round;
      }
    }
    EXPECT_TRUE(store_->consistent());
  }
}

// Slots change hands all the time and the cut comes in the middle of it: old bytes, new bytes, half of each.
TEST_P(PowerCut, NeverServesWrongBytesWhileEvicting) {
  base::Prng prng(seed_ + 1);
  for (std::uint64_t round = 0; round < rounds_; ++round) {
    open();
    for (int i = 0; i < 12; ++i) {
      const std::uint64_t first = prng.below(400);
      const auto numbers = range(first, first + 1 + prng.below(20));
      if (prng.one_in(3)) {
        EXPECT_EQ(count(calls().get(numbers), Code::kUnsupported), 0u);
      } else {
        calls().put(numbers);
      }
      if (prng.one_in(6)) store_->remove(testing::keys_of(numbers));
      if (prng.one_in(4)) store_->housekeep();
    }
    cut();
    EXPECT_EQ(count(calls().get(range(0, 420)), Code::kUnsupported), 0u) << "round " << round;
    EXPECT_TRUE(store_->consistent());
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, PowerCut,
                         ::testing::Values(FsyncPolicy::kAlways, FsyncPolicy::kInterval, FsyncPolicy::kNone),
                         [](const auto& policy) {
                           return std::string(policy.param == FsyncPolicy::kAlways     ? "Always"
                                              : policy.param == FsyncPolicy::kInterval ? "Interval"
                                                                                       : "None");
                         });

}  // namespace
}  // namespace tpusync::flash
