#include "tpusync/flash/ledger.h"

#include <gtest/gtest.h>

#include "tpusync/flash/breaker.h"
#include "tpusync/testing/sim_disk.h"

namespace tpusync::flash {
namespace {

constexpr std::int64_t kHourNs = 3'600'000'000'000;
constexpr std::int64_t kStart = 1'700'000'000'000'000'000;

TEST(Ledger, AccruesADaysBudgetInADayAndNoMore) {
  Ledger ledger = Ledger::begin(2400, kStart);
  EXPECT_EQ(ledger.take(10'000), 2400u);
  EXPECT_TRUE(ledger.refill(2400, kStart + kHourNs));
  EXPECT_EQ(ledger.left_bytes, 100u);
  EXPECT_TRUE(ledger.refill(2400, kStart + 100 * kHourNs));
  EXPECT_EQ(ledger.left_bytes, 2400u);
}

TEST(Ledger, ManyShortStepsAccrueAsMuchAsOneLongOne) {
  Ledger ledger = Ledger::begin(86400, kStart);  // one byte per second
  ledger.take(86400);
  for (std::int64_t i = 1; i <= 100; ++i) ledger.refill(86400, kStart + i * 100'000'000);
  EXPECT_GE(ledger.left_bytes, 9u);
  EXPECT_LE(ledger.left_bytes, 10u);
}

TEST(Ledger, ClockSetBackGivesNothingAndLongAgoStartsOver) {
  Ledger ledger = Ledger::begin(2400, kStart);
  ledger.take(2400);
  EXPECT_TRUE(ledger.refill(2400, kStart - kHourNs));
  EXPECT_EQ(ledger.left_bytes, 0u);
  EXPECT_FALSE(ledger.refill(2400, kStart - 100 * kHourNs));
  EXPECT_EQ(ledger.left_bytes, 2400u);
}

TEST(Ledger, UnusedLeasesComeBack) {
  Ledger ledger = Ledger::begin(1000, kStart);
  EXPECT_EQ(ledger.take(300), 300u);
  ledger.give_back(100, 1000);
  EXPECT_EQ(ledger.left_bytes, 800u);
  EXPECT_EQ(ledger.leased_bytes, 200u);
}

TEST(Breaker, OpensAfterFailuresInARowProbesAndCloses) {
  testing::SimClock clock;
  Breaker breaker(clock, "writing");
  for (int i = 0; i < Breaker::kNumFailures; ++i) {
    EXPECT_TRUE(breaker.allow());
    breaker.failed();
  }
  EXPECT_TRUE(breaker.open());
  EXPECT_FALSE(breaker.allow());
  clock.advance(Breaker::kPauseMin);
  EXPECT_TRUE(breaker.allow());
  EXPECT_FALSE(breaker.allow()) << "one probe at a time";
  breaker.failed();
  clock.advance(Breaker::kPauseMin);
  EXPECT_FALSE(breaker.allow()) << "the pause has doubled";
  clock.advance(Breaker::kPauseMin);
  EXPECT_TRUE(breaker.allow());
  breaker.succeeded();
  EXPECT_FALSE(breaker.open());
  EXPECT_TRUE(breaker.allow());
}

TEST(Breaker, SuccessInBetweenStartsTheCountAnew) {
  testing::SimClock clock;
  Breaker breaker(clock, "writing");
  for (int i = 0; i < 10 * Breaker::kNumFailures; ++i) {
    breaker.failed();
    if (i % (Breaker::kNumFailures - 1) == 0) breaker.succeeded();
  }
  EXPECT_FALSE(breaker.open());
}

}  // namespace
}  // namespace tpusync::flash
