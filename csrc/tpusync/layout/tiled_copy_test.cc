#include "tpusync/layout/tiled_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "tpusync/layout/apply_nest.h"
#include "tpusync/layout/page_copy.h"

namespace tpusync::layout {
namespace {

using base::Code;
using Bytes = std::vector<std::byte>;
using Index = std::function<Dims(std::int64_t slot, std::int64_t head, std::int64_t element)>;

struct Shape {
  const char* what;
  const char* dtype;
  Dims dims;
  const char* text;
  TiledPool::Options options;
  std::int64_t page_size;
  std::uint64_t pieces;  // that a page has in memory
  Index index;           // of the array, by the shape's own meaning
};

constexpr std::int64_t kLayers = 2;

// Layouts as the compiler prints them for such arrays.
std::vector<Shape> shapes() {
  const TiledPool::Options tokens{{0}, {1}, {2}}, split{{0, 1}, {2}, {3}}, fused{{0, 1}, {2, 3}, {4}};
  TiledPool::Options keys = fused, values = fused;
  keys.head_step = values.head_step = 2;
  values.head_first = 1;
  TiledPool::Options latents{{0, 1, 2}, {}, {3}};
  latents.num_elements = 576;
  const Index by_token = [](auto s, auto h, auto e) { return Dims{s, h, e}; };
  const auto paged = [](std::int64_t size) -> Index {
    return [=](auto s, auto h, auto e) { return Dims{s / size, s % size, h, e}; };
  };
  const auto packed = [](std::int64_t size, std::int64_t pack, std::int64_t first,
                         std::int64_t step) -> Index {
    return [=](auto s, auto h, auto e) {
      const auto head = first + h * step;
      return Dims{s / size, s % size, head / pack, head % pack, e};
    };
  };
  return {
      {"one head", "BF16", {256, 1, 128}, "{2,0,1:T(8,128)(2,1)}", tokens, 64, 1, by_token},
      {"two fp8 heads", "F8E4M3FN", {256, 2, 128}, "{2,0,1:T(32,128)(4,1)}", tokens, 64, 2, by_token},
      {"tokens in lanes", "BF16", {256, 8, 64}, "{0,2,1:T(8,128)(2,1)}", tokens, 64, 256, by_token},
      {"latents in lanes", "BF16", {256, 1, 576}, "{0,2,1:T(8,128)(2,1)}", tokens, 64, 288, by_token},
      {"keys apart", "BF16", {4, 64, 8, 128}, "{3,2,1,0:T(8,128)(2,1)}", split, 64, 1, paged(64)},
      {"keys apart, padded", "BF16", {4, 16, 8, 64}, "{3,2,1,0:T(8,128)(2,1)}", split, 16, 64, paged(16)},
      {"fused", "BF16", {4, 16, 8, 2, 128}, "{4,3,2,1,0:T(2,128)(2,1)}", fused, 16, 1, packed(16, 2, 0, 1)},
      {"fused, fp8",
       "F8E4M3FN",
       {4, 16, 4, 4, 128},
       "{4,3,2,1,0:T(4,128)(4,1)}",
       fused,
       16,
       1,
       packed(16, 4, 0, 1)},
      {"fused, keys",
       "BF16",
       {4, 16, 8, 2, 128},
       "{4,3,2,1,0:T(2,128)(2,1)}",
       keys,
       16,
       16 * 8 * 128,
       packed(16, 2, 0, 2)},
      {"fused, fp8 values",
       "F8E4M3FN",
       {4, 16, 4, 4, 128},
       "{4,3,2,1,0:T(4,128)(4,1)}",
       values,
       16,
       16 * 4 * 128 * 2,
       packed(16, 4, 1, 2)},
      {"latents packed",
       "BF16",
       {4, 8, 2, 640},
       "{3,2,1,0:T(2,128)(2,1)}",
       latents,
       16,
       8,
       [](auto s, auto, auto e) { return Dims{s / 16, s % 16 / 2, s % 2, e}; }},
      {"latents transposed",
       "BF16",
       {4, 576, 128},
       "{2,1,0:T(8,128)(2,1)}",
       {{0, 2}, {}, {1}},
       128,
       1,
       [](auto s, auto, auto e) { return Dims{s / 128, e, s % 128}; }},
      {"pages of other sizes", "BF16", {4, 64, 8, 128}, "{3,2,1,0:T(8,128)(2,1)}", split, 16, 1, paged(64)},
  };
}

TiledPool pool_of(const Shape& shape) {
  auto layout = TiledLayout::parse(shape.text, parse_dtype(shape.dtype).value(), shape.dims).value();
  return TiledPool::make(std::move(layout), shape.options).value();
}

PageGeometry geometry_of(const Shape& shape) {
  return PageGeometry::tiled(pool_of(shape), kLayers, shape.page_size).value();
}

PageGeometry host_of(const PageGeometry& device, HostLayout layout) {
  return PageGeometry::host({.layout = layout,
                             .num_layers = kLayers,
                             .num_slots = static_cast<std::int64_t>(device.num_slots()),
                             .num_heads = static_cast<std::int64_t>(device.num_heads()),
                             .head_bytes = static_cast<std::int64_t>(device.head_bytes()),
                             .page_size = static_cast<std::int64_t>(device.page_size())})
      .value();
}

constexpr HostLayout kHostLayouts[] = {HostLayout::kLayerFirst, HostLayout::kPageFirst,
                                       HostLayout::kPageFirstDirect, HostLayout::kPageHead};

// Where an element lies: its first byte on the device, in the buffer of its layer.
std::uint64_t device_place(const Shape& shape, const TiledPool& pool, std::int64_t slot, std::int64_t head,
                           std::int64_t element) {
  return pool.layer().offset_elements(shape.index(slot, head, element)) * pool.layer().element_bits() / 8;
}

template <typename F>
void for_page(const PageGeometry& g, std::int64_t page, F&& body) {
  const auto size = static_cast<std::int64_t>(g.page_size());
  for (std::int64_t slot = page * size; slot < (page + 1) * size; ++slot) {
    for (std::int64_t head = 0; head < static_cast<std::int64_t>(g.num_heads()); ++head) {
      for (std::int64_t e = 0; e < static_cast<std::int64_t>(g.tiles()->num_elements()); ++e)
        body(slot, head, e);
    }
  }
}

TEST(TiledPool, PagesHaveTheRunsOfTheirElements) {
  for (const Shape& shape : shapes()) {
    const PageGeometry g = geometry_of(shape);
    const std::uint64_t size = pool_of(shape).layer().element_bits() / 8;
    const auto last = static_cast<std::int64_t>(g.num_slots() / g.page_size()) - 1;
    for (const std::int64_t page : {std::int64_t{0}, last}) {
      std::vector<std::uint64_t> expected, got;
      for_page(g, page, [&](auto slot, auto head, auto e) {
        for (std::uint64_t byte = 0; byte < size; ++byte)
          expected.push_back(device_place(shape, *g.tiles(), slot, head, e) + byte);
      });
      std::uint64_t pieces = 0, bytes = 0;
      const auto runs = g.runs(page, 1).value();
      for (const CopyRun& run : runs) {
        EXPECT_EQ(run.dst_offset, bytes) << shape.what;
        for (std::uint64_t i = 0; i < run.count; ++i) {
          for (std::uint64_t j = 0; j < run.length; ++j)
            got.push_back(run.src_offset + i * run.src_stride + j);
        }
        pieces += run.count;
        bytes += run.size_bytes();
      }
      std::ranges::sort(expected);
      EXPECT_TRUE(got == expected) << shape.what;
      EXPECT_EQ(bytes, expected.size()) << shape.what;
      EXPECT_EQ(bytes, g.page_bytes() / kLayers) << shape.what;
      EXPECT_EQ(pieces, shape.pieces) << shape.what;
    }
  }
}

// Applies a plan as a stream does: every nest in every layer.
void apply(const PageCopyPlan& plan, std::vector<Bytes>& dst, const std::vector<Bytes>& src) {
  std::vector<std::uint64_t> dst_sizes, src_sizes;
  for (const Bytes& buffer : dst) dst_sizes.push_back(buffer.size());
  for (const Bytes& buffer : src) src_sizes.push_back(buffer.size());
  ASSERT_TRUE(plan.check(dst_sizes, src_sizes));
  for (std::uint64_t layer = plan.first_layer; layer < plan.first_layer + plan.num_layers; ++layer) {
    std::byte* to = dst[plan.dst_layer_stride == 0 ? layer : 0].data() + layer * plan.dst_layer_stride;
    const std::byte* from =
        src[plan.src_layer_stride == 0 ? layer : 0].data() + layer * plan.src_layer_stride;
    for (const CopyNest& nest : plan.nests)
      apply_nest(to, from, nest, best_shuffle_kernels(), Stores::kCached);
  }
}

std::vector<std::int64_t> slots_of_page(const PageGeometry& g, std::int64_t page) {
  std::vector<std::int64_t> slots;
  for (std::uint64_t i = 0; i < g.page_size(); ++i)
    slots.push_back(page * static_cast<std::int64_t>(g.page_size()) + static_cast<std::int64_t>(i));
  return slots;
}

TEST(TiledCopy, APageGoesToEveryHostLayoutAndBackInOnePlan) {
  for (const Shape& shape : shapes()) {
    const PageGeometry device = geometry_of(shape);
    const std::uint64_t size = pool_of(shape).layer().element_bits() / 8;
    std::vector<Bytes> tiled(kLayers, Bytes(pool_of(shape).layer().padded_bytes()));
    for (auto& layer : tiled) {
      for (std::size_t i = 0; i < layer.size(); ++i)
        layer[i] = std::byte(i * 37 + i / 253 + (&layer == &tiled[1]));
    }
    const auto from = slots_of_page(device, 1), to = slots_of_page(device, 3);
    for (const HostLayout layout : kHostLayouts) {
      const PageGeometry host = host_of(device, layout);
      std::vector<Bytes> pool(1, Bytes(host.page_bytes() * (host.num_slots() / host.page_size())));
      apply(plan_page_copy(host, device, to, from, {0, kLayers}).value(), pool, tiled);
      std::vector<Bytes> back(kLayers, Bytes(tiled[0].size()));
      apply(plan_page_copy(device, host, from, to, {0, kLayers}).value(), back, pool);
      bool there = true, again = true;
      for_page(device, 1, [&](auto slot, auto head, auto e) {
        const std::uint64_t at = device_place(shape, *device.tiles(), slot, head, e);
        const std::uint64_t host_slot = static_cast<std::uint64_t>(to[slot - from[0]]);
        for (std::uint64_t layer = 0; layer < kLayers; ++layer) {
          const std::uint64_t host_at = host.offset(host_slot, static_cast<std::uint64_t>(head)) +
                                        layer * host.layer_stride() + static_cast<std::uint64_t>(e) * size;
          there = there && std::memcmp(pool[0].data() + host_at, tiled[layer].data() + at, size) == 0;
          again = again && std::memcmp(back[layer].data() + at, tiled[layer].data() + at, size) == 0;
        }
      });
      EXPECT_TRUE(there) << shape.what << ", host layout " << static_cast<int>(layout);
      EXPECT_TRUE(again) << shape.what << ", host layout " << static_cast<int>(layout);
    }
  }
}

TEST(TiledCopy, FromOneTilingToAnother) {
  const auto all = shapes();
  const Shape& from = all[4];
  Shape to = from;
  to.text = "{3,1,2,0:T(8,128)(2,1)}";  // tokens instead of heads in the rows of a tile
  const PageGeometry src = geometry_of(from), dst = geometry_of(to);
  std::vector<Bytes> before(kLayers, Bytes(src.tiles()->layer().padded_bytes())), after(before);
  for (auto& layer : before) {
    for (std::size_t i = 0; i < layer.size(); ++i) layer[i] = std::byte(i * 37 + i / 253);
  }
  apply(plan_page_copy(dst, src, slots_of_page(dst, 2), slots_of_page(src, 1), {0, 1}).value(), after,
        before);
  bool same = true;
  for_page(src, 1, [&](auto slot, auto head, auto e) {
    same = same && std::memcmp(after[0].data() + device_place(to, *dst.tiles(), slot + 64, head, e),
                               before[0].data() + device_place(from, *src.tiles(), slot, head, e), 2) == 0;
  });
  EXPECT_TRUE(same);
  EXPECT_EQ(after[1], Bytes(after[1].size()));
}

TEST(TiledCopy, PackedNibblesMoveWhereTheyFillBytes) {
  const auto layout =
      TiledLayout::parse("{4,3,2,1,0:T(8,128)(8,1)E(4)}", parse_dtype("S4").value(), Dims{4, 16, 2, 8, 128})
          .value();
  const auto g =
      PageGeometry::tiled(TiledPool::make(layout, {{0, 1}, {2, 3}, {4}}).value(), kLayers, 16).value();
  EXPECT_EQ(g.runs(3, 0).value().size(), 1u);
  const auto slots = slots_of_page(g, 1);
  EXPECT_TRUE(plan_page_copy(g, g, slots, slots, {0, 1}));
  // Two heads of one byte come apart into nibbles.
  EXPECT_EQ(plan_page_copy(host_of(g, HostLayout::kPageFirst), g, slots, slots, {0, 1}).error().code,
            Code::kUnsupported);
}

TEST(TiledPool, RefusesWhatCannotBe) {
  const auto layout =
      TiledLayout::parse("{2,1,0:T(8,128)(2,1)}", parse_dtype("BF16").value(), Dims{64, 8, 128}).value();
  const auto refusal = [&](const TiledPool::Options& options) {
    const auto pool = TiledPool::make(layout, options);
    return pool ? std::string("none") : pool.error().message;
  };
  EXPECT_EQ(refusal({{0}, {1}, {2}}), "none");
  EXPECT_NE(refusal({{0}, {1}, {}}).find("dimension 2 is named 0 times"), std::string::npos);
  EXPECT_NE(refusal({{0}, {1}, {1, 2}}).find("dimension 1 is named 2 times"), std::string::npos);
  EXPECT_NE(refusal({{0}, {1}, {3}}).find("no dimension 3"), std::string::npos);
  EXPECT_NE(refusal({{0}, {1}, {2}, 8, 1}).find("from head 8 on"), std::string::npos);
  EXPECT_NE(refusal({{0}, {1}, {2}, 0, 0}).find("every 0th"), std::string::npos);
  EXPECT_NE(refusal({{0}, {1}, {2}, 0, 1, 129}).find("129 of 128 elements"), std::string::npos);

  const auto pool = TiledPool::make(layout, {{0}, {1}, {2}}).value();
  EXPECT_NE(PageGeometry::tiled(pool, 2, 48).error().message.find("64 is no multiple of page_size 48"),
            std::string::npos);
  EXPECT_EQ(PageGeometry::tiled(pool, 0, 16).error().code, Code::kInvalid);
  const auto g = PageGeometry::tiled(pool, 2, 16).value();
  EXPECT_NE(g.runs(4, 0).error().message.find("page 4 of 4 in layer 0 of 2"), std::string::npos);
  EXPECT_FALSE(g.runs(-1, 0));
  EXPECT_FALSE(g.runs(0, 2));
  EXPECT_EQ(g, PageGeometry::tiled(pool, 2, 16).value());
  EXPECT_FALSE(g == PageGeometry::tiled(pool, 2, 32).value());
}

TEST(TiledCopy, RefusesTornPagesAndRowsOfOtherSizes) {
  const auto all = shapes();
  const PageGeometry device = geometry_of(all[4]), host = host_of(device, HostLayout::kPageFirst);
  auto slots = slots_of_page(device, 1);
  EXPECT_FALSE(plan_page_copy(host, geometry_of(all[5]), slots, slots, {0, kLayers}));
  std::swap(slots[0], slots[1]);
  EXPECT_NE(plan_page_copy(host, device, slots, slots, {0, kLayers}).error().message.find("is not token"),
            std::string::npos);
}

TEST(PageGeometry, RunsOfLinearPoolsAreThoseOfTheirRows) {
  const auto host = [](HostLayout layout) {
    return PageGeometry::host({layout, kLayers, 12, 5, 2, 4}).value().runs(1, 1).value();
  };
  using Runs = std::vector<CopyRun>;
  EXPECT_EQ(host(HostLayout::kLayerFirst), (Runs{{(12 + 4) * 10, 0, 40}}));
  EXPECT_EQ(host(HostLayout::kPageFirst), (Runs{{4 * 20 + 10, 0, 10, 4, 20, 10}}));
  EXPECT_EQ(host(HostLayout::kPageFirstDirect), (Runs{{4 * 20 + 40, 0, 40}}));
  EXPECT_EQ(host(HostLayout::kPageHead), (Runs{{4 * 20 + 2, 0, 2, 20, 4, 2}}));
}

}  // namespace
}  // namespace tpusync::layout
