// What a full store takes in, once it has seen how its pages are used.
#include <gtest/gtest.h>

#include "tpusync/flash/flash_store.h"
#include "tpusync/testing/sim_disk.h"
#include "tpusync/testing/store_harness.h"

namespace tpusync::flash {
namespace {

using base::Code;
using testing::count;
using testing::range;

constexpr std::uint64_t kPageBytes = 64;   // a slot is 4096 all the same
constexpr std::uint64_t kNumPages = 1700;  // that fit: less than what is used
constexpr std::uint64_t kPrefixPages = 20;
constexpr std::uint64_t kNumUsed = 90 * kPrefixPages;

class Admission : public ::testing::Test {
 protected:
  // Every prefix that is used, and between them pages that never return. Answers the hits.
  std::size_t round() {
    std::size_t num_hits = 0;
    for (std::uint64_t first = 0; first < kNumUsed; first += kPrefixPages) {
      const auto used = range(first, first + kPrefixPages);
      const std::size_t hits = store_->match(testing::keys_of(used), {});
      num_hits += hits;
      if (hits < kPrefixPages) calls_.put(used);
      calls_.put(range(next_, next_ + kPrefixPages));
      next_ += kPrefixPages;
    }
    return num_hits;
  }

  const testing::LogCapture log_;
  testing::SimClock clock_;
  testing::SimDisk disk_{{.total_bytes = 1 << 26}};
  FlashOptions options_ = [this] {
    auto options = testing::small_options("/store", kPageBytes, kNumPages * (4096 + 64) + 65536);
    options.write_budget_bytes_per_day = std::uint64_t{1} << 40;
    options.clock = &clock_;
    return options;
  }();
  std::unique_ptr<FlashStore> store_ = FlashStore::open(options_, disk_).value();
  testing::StoreCalls calls_{*store_, kPageBytes};
  std::uint64_t next_ = 1'000'000;
};

TEST_F(Admission, AScanNeitherWashesOutWhatIsUsedNorIsWritten) {
  for (int i = 0; i < 60; ++i) round();
  const std::uint64_t written = calls_.stat("put_bytes");
  const std::uint64_t declined = calls_.stat("refused_admission");
  std::size_t num_hits = 0;
  for (int i = 0; i < 5; ++i) num_hits += round();
  // By recency alone there would be no hit: every page is asked for after twice as many others as fit.
  EXPECT_GE(num_hits, 5 * kNumUsed * 8 / 10);
  EXPECT_LE(calls_.stat("put_bytes") - written, 1000 * kPageBytes) << "of 9000 pages that never return";
  EXPECT_GE(calls_.stat("refused_admission") - declined, 8000u);
  EXPECT_TRUE(store_->consistent());
}

}  // namespace
}  // namespace tpusync::flash
