#include "tpusync/layout/page_copy.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace tpusync::layout {
namespace {

using base::Code;
using Slots = std::vector<std::int64_t>;

PageGeometry device(std::int64_t page_size = 4, std::int64_t row_stride = 12) {
  return PageGeometry::device({.num_layers = 3,
                               .num_slots = 32,
                               .row_bytes = 12,
                               .row_stride_bytes = row_stride,
                               .page_size = page_size})
      .value();
}

PageGeometry host(HostLayout layout, std::int64_t page_size = 4) {
  return PageGeometry::host({.layout = layout,
                             .num_layers = 3,
                             .num_slots = 48,
                             .num_heads = 3,
                             .head_bytes = 4,
                             .page_size = page_size})
      .value();
}

std::string refusal(const Slots& dst, const Slots& src, LayerRange layers = {0, 3},
                    HostLayout layout = HostLayout::kPageFirst) {
  const auto plan = plan_page_copy(host(layout), device(), dst, src, layers);
  EXPECT_FALSE(plan.has_value());
  if (plan) return "";
  EXPECT_EQ(plan.error().code, Code::kInvalid);
  return plan.error().message;
}

// Where each byte of layer 0 goes, from the runs.
std::map<std::uint64_t, std::uint64_t> moves(const PageCopyPlan& plan) {
  std::map<std::uint64_t, std::uint64_t> out;
  for (const CopyRun& run : plan.runs) {
    for (std::uint64_t i = 0; i < run.count; ++i) {
      for (std::uint64_t j = 0; j < run.length; ++j) {
        EXPECT_TRUE(
            out.emplace(run.dst_offset + i * run.dst_stride + j, run.src_offset + i * run.src_stride + j)
                .second);
      }
    }
  }
  return out;
}

// The same from the definition of the geometries, byte by byte. Rows are 3 heads of 4 bytes.
std::map<std::uint64_t, std::uint64_t> expected_moves(const PageGeometry& dst, const PageGeometry& src,
                                                      const Slots& to, const Slots& from) {
  const auto at = [](const PageGeometry& g, std::int64_t slot, std::uint64_t byte) {
    return g.num_heads() == 1 ? g.offset(slot, 0) + byte : g.offset(slot, byte / 4) + byte % 4;
  };
  std::map<std::uint64_t, std::uint64_t> out;
  for (std::size_t i = 0; i < to.size(); ++i) {
    for (std::uint64_t byte = 0; byte < 12; ++byte) out[at(dst, to[i], byte)] = at(src, from[i], byte);
  }
  return out;
}

Slots random_pages(std::mt19937& random, std::int64_t num_slots, std::int64_t page_size,
                   std::size_t num_pages) {
  Slots pages(num_slots / page_size), slots;
  for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<std::int64_t>(i) * page_size;
  std::shuffle(pages.begin(), pages.end(), random);
  for (std::size_t i = 0; i < num_pages; ++i) {
    for (std::int64_t j = 0; j < page_size; ++j) slots.push_back(pages[i] + j);
  }
  return slots;
}

TEST(PageCopy, MovesTheBytesOfTheDefinitionBetweenAllGeometries) {
  std::mt19937 random(1);
  for (const std::int64_t page_size : {1, 2, 4}) {
    std::vector<PageGeometry> geometries{device(page_size), device(page_size, 20)};
    for (const auto layout : {HostLayout::kLayerFirst, HostLayout::kPageFirst, HostLayout::kPageFirstDirect,
                              HostLayout::kPageHead}) {
      geometries.push_back(host(layout, page_size));
    }
    for (const PageGeometry& dst : geometries) {
      for (const PageGeometry& src : geometries) {
        for (const std::size_t num_pages : {1, 2, 7}) {
          const Slots to = random_pages(random, 32, page_size, num_pages),
                      from = random_pages(random, 32, page_size, num_pages);
          const PageCopyPlan plan = plan_page_copy(dst, src, to, from, {1, 3}).value();
          EXPECT_EQ(moves(plan), expected_moves(dst, src, to, from));
          EXPECT_EQ(plan.size_bytes_per_part, to.size() * 12 * 2);
        }
      }
    }
  }
}

TEST(PageCopy, ConsecutivePagesAreOneRun) {
  Slots slots(16);
  for (int i = 0; i < 16; ++i) slots[i] = i + 4;
  EXPECT_EQ(plan_page_copy(host(HostLayout::kLayerFirst), device(), slots, slots, {0, 3}).value().runs,
            (std::vector<CopyRun>{{.src_offset = 48, .dst_offset = 48, .length = 192}}));
  EXPECT_EQ(plan_page_copy(host(HostLayout::kPageFirst), device(), slots, slots, {0, 3}).value().runs,
            (std::vector<CopyRun>{{.src_offset = 48,
                                   .dst_offset = 144,
                                   .length = 12,
                                   .count = 16,
                                   .src_stride = 12,
                                   .dst_stride = 36}}));
  EXPECT_EQ(plan_page_copy(host(HostLayout::kPageFirstDirect), device(), slots, slots, {0, 3}).value().runs,
            (std::vector<CopyRun>{{.src_offset = 48,
                                   .dst_offset = 144,
                                   .length = 48,
                                   .count = 4,
                                   .src_stride = 48,
                                   .dst_stride = 144}}));
}

TEST(PageCopy, RefusesWithTheNumbers) {
  EXPECT_NE(refusal({0, 1, 2, 48}, {0, 1, 2, 3}).find("destination slot 48 of token 3 is not in [0, 48)"),
            std::string::npos);
  EXPECT_NE(refusal({0, 1, 2, 3}, {0, 1, 2, -1}).find("source slot -1"), std::string::npos);
  EXPECT_NE(refusal({0, 1, 2, INT64_MAX}, {0, 1, 2, 3}).find("9223372036854775807"), std::string::npos);
  EXPECT_NE(refusal({0, 1, 2, INT64_MIN}, {0, 1, 2, 3}).find("-9223372036854775808"), std::string::npos);
  EXPECT_NE(refusal({0, 1, 2}, {0, 1, 2}).find("3 tokens are no multiple of the page size 4"),
            std::string::npos);
  EXPECT_NE(refusal({0, 1, 2, 3}, {0, 1, 2}).find("3 source slots for 4 destination slots"),
            std::string::npos);
  EXPECT_NE(refusal({0, 1, 2, 1}, {0, 1, 2, 3}).find("given twice"), std::string::npos);
  EXPECT_NE(refusal({0, 1, 2, 3}, {0, 1, 2, 3}, {0, 4}).find("layers [0, 4) of 3"), std::string::npos);
  EXPECT_NE(refusal({0, 1, 2, 3}, {0, 1, 2, 3}, {2, 1}).find("layers [2, 1)"), std::string::npos);
  EXPECT_NE(refusal({1, 2, 3, 4}, {0, 1, 2, 3}, {0, 3}, HostLayout::kPageHead)
                .find("is not token 0 of a page of 4"),
            std::string::npos);
  EXPECT_NE(
      refusal({0, 1, 2, 7}, {0, 1, 2, 3}, {0, 3}, HostLayout::kPageFirstDirect).find("slot 7 of token 3"),
      std::string::npos);
  EXPECT_NE(refusal({-4, -3, -2, -1}, {0, 1, 2, 3}, {0, 3}, HostLayout::kPageFirstDirect).find("slot -4"),
            std::string::npos);
}

TEST(PageCopy, RefusesRowsThatDiffer) {
  const auto other =
      PageGeometry::device(
          {.num_layers = 3, .num_slots = 32, .row_bytes = 16, .row_stride_bytes = 16, .page_size = 4})
          .value();
  EXPECT_NE(plan_page_copy(other, device(), {}, {}, {0, 3}).error().message.find("12 bytes to rows of 16"),
            std::string::npos);
}

TEST(PageCopy, ChecksEveryLayerAgainstItsBuffer) {
  const Slots slots{28, 29, 30, 31};
  const PageCopyPlan plan =
      plan_page_copy(host(HostLayout::kPageFirst), device(4, 20), slots, slots, {0, 3}).value();
  const std::uint64_t device_end = 31 * 20 + 12, host_end = 32 * 36;
  const std::vector<std::uint64_t> src(6, device_end), dst(2, host_end);
  EXPECT_TRUE(plan.check(dst, src));
  auto short_src = src;
  short_src[4] -= 1;
  EXPECT_NE(plan.check(dst, short_src).error().message.find("up to 632 of layer 1 in source buffer 4 of 631"),
            std::string::npos);
  EXPECT_NE(plan.check(std::vector<std::uint64_t>{host_end, host_end - 1}, src)
                .error()
                .message.find("destination buffer 1"),
            std::string::npos);
  EXPECT_NE(plan.check(dst, std::vector<std::uint64_t>(3, device_end))
                .error()
                .message.find("3 source buffers at 3 a part"),
            std::string::npos);
  EXPECT_FALSE(plan.check(dst, std::vector<std::uint64_t>(5, device_end)));
}

TEST(PageCopy, BuffersOfOtherLayersAreNotLookedAt) {
  const Slots slots{0, 1, 2, 3};
  const PageCopyPlan plan = plan_page_copy(device(), device(), slots, slots, {1, 2}).value();
  EXPECT_TRUE(plan.check(std::vector<std::uint64_t>{0, 384, 0}, std::vector<std::uint64_t>{0, 384, 0}));
}

TEST(PageCopy, NoTokensAreNoRuns) {
  EXPECT_TRUE(plan_page_copy(device(), host(HostLayout::kPageHead), {}, {}, {0, 3}).value().runs.empty());
}

}  // namespace
}  // namespace tpusync::layout
