#include "tpusync/layout/page_geometry.h"

#include <gtest/gtest.h>

namespace tpusync::layout {
namespace {

using base::Code;

constexpr std::uint64_t kLayers = 3, kSlots = 12, kHeads = 5, kHeadBytes = 2, kPage = 4;

PageGeometry host(HostLayout layout) {
  return PageGeometry::host({.layout = layout,
                             .num_layers = kLayers,
                             .num_slots = kSlots,
                             .num_heads = kHeads,
                             .head_bytes = kHeadBytes,
                             .page_size = kPage})
      .value();
}

// Row-major offset of indices in dims.
std::uint64_t row_major(std::initializer_list<std::uint64_t> indices,
                        std::initializer_list<std::uint64_t> dims) {
  std::uint64_t at = 0;
  auto dim = dims.begin();
  for (const std::uint64_t index : indices) at = at * *dim++ + index;
  return at;
}

template <typename F>
void for_all(F&& body) {
  for (std::uint64_t layer = 0; layer < kLayers; ++layer) {
    for (std::uint64_t slot = 0; slot < kSlots; ++slot) {
      for (std::uint64_t head = 0; head < kHeads; ++head) body(layer, slot, head);
    }
  }
}

std::uint64_t offset(const PageGeometry& g, std::uint64_t layer, std::uint64_t slot, std::uint64_t head) {
  return g.offset(slot, head) + layer * g.layer_stride();
}

TEST(PageGeometry, LayerFirstIsLayerSlotHead) {
  const PageGeometry g = host(HostLayout::kLayerFirst);
  for_all([&](auto l, auto s, auto h) {
    EXPECT_EQ(offset(g, l, s, h), row_major({l, s, h, 0}, {kLayers, kSlots, kHeads, kHeadBytes}));
  });
  EXPECT_FALSE(g.paged());
}

TEST(PageGeometry, PageFirstIsSlotLayerHead) {
  const PageGeometry g = host(HostLayout::kPageFirst);
  for_all([&](auto l, auto s, auto h) {
    EXPECT_EQ(offset(g, l, s, h), row_major({s, l, h, 0}, {kSlots, kLayers, kHeads, kHeadBytes}));
  });
  EXPECT_FALSE(g.paged());
}

TEST(PageGeometry, PageFirstDirectIsPageLayerTokenHead) {
  const PageGeometry g = host(HostLayout::kPageFirstDirect);
  for_all([&](auto l, auto s, auto h) {
    EXPECT_EQ(offset(g, l, s, h), row_major({s / kPage, l, s % kPage, h, 0},
                                            {kSlots / kPage, kLayers, kPage, kHeads, kHeadBytes}));
  });
  EXPECT_TRUE(g.paged());
  EXPECT_EQ(g.span_slots(), kPage);
}

TEST(PageGeometry, PageHeadIsPageHeadTokenLayer) {
  const PageGeometry g = host(HostLayout::kPageHead);
  for_all([&](auto l, auto s, auto h) {
    EXPECT_EQ(offset(g, l, s, h), row_major({s / kPage, h, s % kPage, l, 0},
                                            {kSlots / kPage, kHeads, kPage, kLayers, kHeadBytes}));
  });
  EXPECT_FALSE(g.whole_rows());
}

TEST(PageGeometry, DeviceRowsMayBeFurtherApartThanTheyAreLong) {
  const PageGeometry g =
      PageGeometry::device(
          {.num_layers = 3, .num_slots = 12, .row_bytes = 10, .row_stride_bytes = 16, .page_size = 4})
          .value();
  EXPECT_EQ(g.offset(7, 0), 7u * 16);
  EXPECT_EQ(g.buffers_per_part(), 3u);
  EXPECT_EQ(g.row_bytes(), 10u);
  EXPECT_EQ(g.page_bytes(), 10u * 4 * 3);
  EXPECT_FALSE(g.paged());
}

TEST(PageGeometry, RefusesWhatCannotBe) {
  const auto device = [](PageGeometry::DeviceOptions o) { return PageGeometry::device(o).error(); };
  EXPECT_EQ(device({0, 12, 10, 10, 4}).code, Code::kInvalid);
  EXPECT_NE(device({1, -3, 10, 10, 4}).message.find("num_slots is -3"), std::string::npos);
  EXPECT_NE(device({1, 12, 10, 9, 4}).message.find("row_stride_bytes 9"), std::string::npos);
  EXPECT_NE(device({1 << 30, 1 << 30, 1 << 30, 1 << 30, 4}).message.find("2^62"), std::string::npos);
  EXPECT_NE(device({1, INT64_MAX, 1, 1, 1}).message.find("at most 2147483648"), std::string::npos);
  const auto torn = PageGeometry::host({.layout = HostLayout::kPageHead,
                                        .num_layers = 1,
                                        .num_slots = 13,
                                        .num_heads = 1,
                                        .head_bytes = 1,
                                        .page_size = 4});
  EXPECT_NE(torn.error().message.find("13 is no multiple"), std::string::npos);
  EXPECT_NE(parse_host_layout("page_last").error().message.find("page_first_direct"), std::string::npos);
}

}  // namespace
}  // namespace tpusync::layout
