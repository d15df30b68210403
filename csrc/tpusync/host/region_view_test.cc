#include "tpusync/host/region_view.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "tpusync/host/testing.h"

namespace tpusync::host {
namespace {

using index::SlotId;
using namespace testing;

class RegionViewTest : public ::testing::Test {
 protected:
  std::unique_ptr<Region> open(std::uint64_t num_slots, std::uint64_t namespace_number = 1) {
    auto region = open_region(options_in(directory_.path(), small_geometry(num_slots), namespace_number));
    EXPECT_TRUE(region) << region.error().message;
    return region ? std::move(*region) : nullptr;
  }
  std::vector<RegionView> views() const { return view_regions(*Registry::open(directory_.path())); }
  std::unique_ptr<RegionCheck> check(std::size_t number = 0) const {
    auto opened = RegionCheck::open(views()[number].entry);
    EXPECT_TRUE(opened) << opened.error().message;
    return opened ? std::move(*opened) : nullptr;
  }
  MemoryDirectory directory_;
};

TEST_F(RegionViewTest, TellsWhatARegionHoldsWithAndWithoutAWriter) {
  auto region = open(8);
  ASSERT_EQ(put_pages(*region, 0, 3).size(), 3u);
  std::vector<RegionView> seen = views();
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_TRUE(seen[0].has_writer);
  EXPECT_EQ(seen[0].writer->process_id, static_cast<std::uint32_t>(::getpid()));
  EXPECT_EQ(seen[0].num_pages, 3u);
  EXPECT_EQ(seen[0].num_slots, 8u);
  EXPECT_EQ(seen[0].page_bytes, 8192u);
  EXPECT_EQ(seen[0].entry.name_space, digest_of(1));
  region.reset();
  seen = views();
  EXPECT_FALSE(seen[0].has_writer);
  EXPECT_EQ(seen[0].num_pages, 3u);
  EXPECT_TRUE(seen[0].trouble.empty());
  auto keys = keys_in(seen[0].entry);
  ASSERT_TRUE(keys);
  auto expected = keys_of(0, 3);
  std::sort(keys->begin(), keys->end());
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(*keys, expected);
}

TEST_F(RegionViewTest, AFileThatIsNoRegionIsNamedAndTheOthersAreRead) {
  const auto region = open(4, 2);
  const Registry registry = *Registry::open(directory_.path());
  std::FILE* const file = std::fopen(registry.path_of(digest_of(1), 0).c_str(), "w");
  std::fputs("not a region", file);
  std::fclose(file);
  std::size_t num_bad = 0;
  for (const RegionView& view : views()) {
    num_bad += !view.trouble.empty();
    EXPECT_EQ(view.trouble.empty(), view.num_slots == 4);
  }
  EXPECT_EQ(num_bad, 1u);
  EXPECT_EQ(views().size(), 2u);
}

TEST_F(RegionViewTest, ACheckReadsEveryPageInSteps) {
  const auto region = open(16);
  ASSERT_EQ(put_pages(*region, 0, 10).size(), 10u);
  const auto whole = check();
  int num_steps = 1;
  while (whole->step(8192)) ++num_steps;
  EXPECT_GE(num_steps, 10);
  EXPECT_EQ(whole->progress().num_looked_at, 16u);
  EXPECT_EQ(whole->progress().num_intact, 10u);
  EXPECT_EQ(whole->progress().num_bytes, 10u * 8192);
  EXPECT_TRUE(whole->findings().empty());
}

TEST_F(RegionViewTest, ADamagedPageAndADamagedRecordAreFound) {
  const auto region = open(8);
  const std::vector<SlotId> slots = put_pages(*region, 0, 5);
  ASSERT_EQ(slots.size(), 5u);
  region->piece(slots[1], 1)[77] ^= std::byte{1};
  // A byte of the key in the seal of another.
  const RegionView view = views()[0];
  std::FILE* const file = std::fopen(view.entry.path.c_str(), "r+");
  ASSERT_NE(file, nullptr);
  const long at = static_cast<long>(kHeaderBytes + kSealBytes * index::to_number(slots[3]) + 12);
  std::fseek(file, at, SEEK_SET);
  const int byte = std::fgetc(file);
  std::fseek(file, at, SEEK_SET);
  std::fputc(byte ^ 4, file);
  std::fclose(file);
  EXPECT_EQ(views()[0].num_pages, 4u);
  EXPECT_EQ(views()[0].num_damaged, 1u);
  const auto damaged = check();
  while (damaged->step(1 << 20)) {
  }
  EXPECT_EQ(damaged->progress().num_intact, 3u);
  ASSERT_EQ(damaged->findings().size(), 2u);
  for (const RegionCheck::Finding& finding : damaged->findings()) {
    EXPECT_EQ(finding.slot, finding.is_record ? slots[3] : slots[1]);
  }
  EXPECT_NE(damaged->findings()[0].is_record, damaged->findings()[1].is_record);
}

TEST_F(RegionViewTest, APageThatIsAllocatedBetweenStepsIsNoDamage) {
  const auto region = open(4);
  const std::vector<SlotId> slots = put_pages(*region, 0, 4);
  ASSERT_TRUE(region->free(slots));
  const auto beside = check();
  ASSERT_TRUE(beside->step(1));
  const std::vector<SlotId> again = region->alloc(4);
  ASSERT_EQ(again.size(), 4u);
  for (const SlotId slot : again) fill_page(*region, slot, 99);
  while (beside->step(1)) {
  }
  EXPECT_TRUE(beside->findings().empty());
  EXPECT_EQ(beside->progress().num_intact, 1u);
}

}  // namespace
}  // namespace tpusync::host
