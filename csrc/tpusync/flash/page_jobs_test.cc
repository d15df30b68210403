#include "tpusync/flash/page_jobs.h"

#include <gtest/gtest.h>

namespace tpusync::flash {
namespace {

std::vector<std::size_t> sizes(const std::vector<std::uint32_t>& slots, std::uint64_t page_bytes,
                               std::uint64_t slot_bytes) {
  std::vector<index::SlotId> ids;
  for (const std::uint32_t slot : slots) ids.push_back(index::SlotId{slot});
  std::vector<std::size_t> out;
  std::size_t end = 0;
  for (const Stretch& stretch : stretches_of(ids, page_bytes, slot_bytes)) {
    EXPECT_EQ(stretch.begin, end);
    end = stretch.end;
    out.push_back(stretch.size());
  }
  EXPECT_EQ(end, slots.size());
  return out;
}

using Sizes = std::vector<std::size_t>;

TEST(Stretches, AreSlotsThatFollowEachOther) {
  EXPECT_EQ(sizes({}, 4096, 4096), Sizes{});
  EXPECT_EQ(sizes({7}, 4096, 4096), Sizes{1});
  EXPECT_EQ(sizes({0, 1, 2, 9, 10, 4, 3}, 4096, 4096), (Sizes{3, 2, 1, 1}));
}

TEST(Stretches, EndAtTheSizeWhereATransferCostsWhatItsBytesCost) {
  std::vector<std::uint32_t> slots(9);
  for (std::uint32_t i = 0; i < slots.size(); ++i) slots[i] = i;
  EXPECT_EQ(sizes(slots, kStretchBytesMax / 4, kStretchBytesMax / 4), (Sizes{4, 4, 1}));
  EXPECT_EQ(sizes(slots, kStretchBytesMax * 2, kStretchBytesMax * 2), Sizes(9, 1));
}

TEST(Stretches, PagesThatDoNotFillTheirSlotsStandAlone) {
  EXPECT_EQ(sizes({0, 1, 2}, 4000, 4096), Sizes(3, 1));
}

}  // namespace
}  // namespace tpusync::flash
