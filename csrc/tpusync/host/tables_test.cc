#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>

#include "tpusync/base/checksum.h"
#include "tpusync/host/checked_copy.h"
#include "tpusync/host/key_table.h"
#include "tpusync/host/seal_table.h"
#include "tpusync/host/testing.h"

namespace tpusync::host {
namespace {

using index::kNoSlot;
using index::SlotId;
using testing::key_of;

class Records {
 public:
  alignas(64) std::array<std::byte, 8 * kSealBytes> bytes{};
};

TEST(SealTable, AReaderSeesAWholeSealOrNone) {
  Records records;
  SealTable table(records.bytes.data(), 42);
  std::atomic<bool> stop = false;
  std::atomic<int> num_read = 0;
  std::jthread reader([&] {
    const SealTable mine(records.bytes.data(), 42);
    while (!stop) {
      const auto seal = mine.read(SlotId{3});
      if (!seal) continue;
      // Every field of a seal follows from its generation.
      ASSERT_EQ(seal->key, key_of(seal->generation));
      ASSERT_EQ(seal->payload_checksum, seal->generation * 3);
      num_read.fetch_add(1);
    }
  });
  for (std::uint64_t generation = 1; generation < 20000 || num_read < 10; ++generation) {
    table.publish(SlotId{3}, {.key = key_of(generation),
                              .ancestry = {},
                              .generation = generation,
                              .payload_checksum = generation * 3,
                              .length_bytes = 1});
    if (generation % 2 == 0) std::this_thread::yield();
    table.retract(SlotId{3});
  }
  stop = true;
}

TEST(SealTable, ARetractedSealKeepsItsGeneration) {
  Records records;
  SealTable table(records.bytes.data(), 42);
  table.publish(
      SlotId{1},
      {.key = key_of(1), .ancestry = {}, .generation = 9, .payload_checksum = 0, .length_bytes = 1});
  EXPECT_TRUE(table.holds(SlotId{1}, 9));
  EXPECT_FALSE(table.holds(SlotId{1}, 8));
  table.retract(SlotId{1});
  EXPECT_FALSE(table.holds(SlotId{1}, 9));
  EXPECT_FALSE(table.read(SlotId{1}));
  EXPECT_FALSE(table.marked(SlotId{1}));
  EXPECT_EQ(table.last_generation(SlotId{1}), 9u);
}

TEST(KeyTable, AgreesWithAMapUnderRandomOperations) {
  constexpr std::uint32_t kNumSlots = 64;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    base::Prng prng(seed);
    std::vector<std::uint32_t> chain(kNumSlots), buckets(8);  // few buckets: long chains
    KeyTable table(chain.data(), kNumSlots, buckets.data(), buckets.size());
    std::map<std::uint32_t, std::uint64_t> model;
    for (int step = 0; step < 3000; ++step) {
      const auto number = static_cast<std::uint32_t>(prng.below(kNumSlots));
      if (const auto it = model.find(number); it != model.end()) {
        table.erase(it->second, SlotId{number});
        model.erase(it);
      } else {
        const std::uint64_t hash = key_of(prng.below(40)).short_hash();
        table.insert(hash, SlotId{number});
        model[number] = hash;
      }
      for (const auto& [slot, hash] : model) {
        ASSERT_EQ(table.find(hash, [&](SlotId found) { return found == SlotId{slot}; }), SlotId{slot});
      }
    }
  }
}

TEST(KeyTable, DamageNeverMakesAWalkEndlessOrLeavesTheTable) {
  constexpr std::uint32_t kNumSlots = 16;
  base::Prng prng(3);
  std::vector<std::uint32_t> chain(kNumSlots), buckets(4);
  KeyTable table(chain.data(), kNumSlots, buckets.data(), buckets.size());
  for (int run = 0; run < 2000; ++run) {
    for (auto& word : chain)
      word = static_cast<std::uint32_t>(prng.one_in(4) ? prng.next() : prng.below(kNumSlots + 2));
    for (auto& word : buckets) word = static_cast<std::uint32_t>(prng.below(kNumSlots + 2));
    table.find(prng.next(), [&](SlotId slot) {
      EXPECT_LT(index::to_number(slot), kNumSlots);
      return false;
    });
    table.erase(prng.next(), SlotId{static_cast<std::uint32_t>(prng.below(kNumSlots))});
  }
}

TEST(CheckedCopy, EqualsTheChecksumOfTheWholeForAnyPiecesAndPlaces) {
  base::Prng prng(1);
  for (std::size_t kernel = 0; kernel < checksum_instructions().size(); ++kernel) {
    SCOPED_TRACE(checksum_instructions()[kernel]);
    for (int run = 0; run < 200; ++run) {
      const std::size_t from_skew = prng.below(65), to_skew = prng.below(65), num_bytes = prng.below(100000);
      std::vector<std::byte> source(from_skew + num_bytes), target(to_skew + num_bytes + 64, std::byte{7});
      prng.fill(source);
      const auto from = std::span(source).subspan(from_skew);
      CheckedCopy copy(run, kernel), look(run, kernel);
      for (std::size_t at = 0; at < num_bytes;) {
        const std::size_t size =
            std::min<std::size_t>(1 + prng.below(run % 2 == 0 ? 40000 : 300), num_bytes - at);
        copy.copy(target.data() + to_skew + at, from.subspan(at, size));
        look.look(from.subspan(at, size));
        at += size;
      }
      const auto to = std::span(target).subspan(to_skew, num_bytes);
      EXPECT_TRUE(std::ranges::equal(to, from));
      EXPECT_EQ(copy.value(), base::checksum64(from, run));
      EXPECT_EQ(look.value(), base::checksum64(from, run));
      const auto is_untouched = [](std::byte byte) { return byte == std::byte{7}; };
      EXPECT_TRUE(std::ranges::all_of(std::span(target).first(to_skew), is_untouched));
      EXPECT_TRUE(std::ranges::all_of(std::span(target).last(64), is_untouched));
    }
  }
}

#if !defined(__SANITIZE_THREAD__)  // the race is the point: in use it is one with another process
TEST(CheckedCopy, SumsUpWhatArrivesWhileOthersWriteToTheSource) {
  for (std::size_t kernel = 0; kernel < checksum_instructions().size(); ++kernel) {
    SCOPED_TRACE(checksum_instructions()[kernel]);
    std::vector<std::byte> source(1 << 16), target(source.size());
    auto* const words = reinterpret_cast<std::uint64_t*>(source.data());
    std::atomic<bool> ended{false};
    std::thread writer([&] {
      for (std::uint64_t value = 0; !ended; ++value) {
        for (std::size_t i = 0; i < source.size() / 8; ++i)
          __atomic_store_n(words + i, value * 0x9E3779B97F4A7C15U, __ATOMIC_RELAXED);
      }
    });
    for (int run = 0; run < 200; ++run) {
      CheckedCopy copy(run, kernel);
      copy.copy(target.data(), source);
      EXPECT_EQ(copy.value(), base::checksum64(target, run));
    }
    ended = true;
    writer.join();
  }
}
#endif

}  // namespace
}  // namespace tpusync::host
