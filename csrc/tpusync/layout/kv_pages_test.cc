#include "tpusync/layout/kv_pages.h"

#include <gtest/gtest.h>

#include <cstring>

#include "tpusync/layout/convert.h"

namespace tpusync::layout {
namespace {

using Bytes = std::vector<std::byte>;

struct Pool {
  const char* what;
  const char* dtype;
  Dims dims;
  const char* text;
  std::int64_t page_indices;
  std::uint64_t pieces;  // that a page has in memory
};

const Pool kPools[] = {
    {"tokens, one head", "BF16", {4160, 1, 128}, "{2,0,1:T(8,128)(2,1)}", 64, 1},
    {"tokens, two fp8 heads", "F8E4M3FN", {4160, 2, 128}, "{2,0,1:T(32,128)(4,1)}", 64, 2},
    {"tokens in lanes", "BF16", {4096, 8, 64}, "{0,2,1:T(8,128)(2,1)}", 64, 256},
    {"latents in lanes", "BF16", {4096, 1, 576}, "{0,2,1:T(8,128)(2,1)}", 64, 288},
    {"keys apart", "BF16", {64, 64, 8, 128}, "{3,2,1,0:T(8,128)(2,1)}", 1, 1},
    {"keys apart, padded", "BF16", {64, 16, 8, 64}, "{3,2,1,0:T(8,128)(2,1)}", 1, 64},
    {"keys and values packed", "BF16", {64, 16, 8, 2, 128}, "{4,3,2,1,0:T(2,128)(2,1)}", 1, 1},
    {"fp8 packed by four", "F8E4M3FN", {64, 16, 4, 4, 128}, "{4,3,2,1,0:T(4,128)(4,1)}", 1, 1},
    {"int4 packed by eight", "S4", {64, 16, 2, 8, 128}, "{4,3,2,1,0:T(8,128)(8,1)E(4)}", 1, 1},
    {"latents packed", "BF16", {64, 8, 2, 640}, "{3,2,1,0:T(2,128)(2,1)}", 1, 1},
    {"latents transposed", "BF16", {16, 576, 128}, "{2,1,0:T(8,128)(2,1)}", 1, 1},
};

KvPages pages_of(const Pool& pool) {
  return KvPages::make(TiledLayout::parse(pool.text, parse_dtype(pool.dtype).value(), pool.dims).value(),
                       pool.page_indices)
      .value();
}

TEST(KvPages, HaveTheRunsThatTheCompilersLayoutsGiveThem) {
  for (const Pool& pool : kPools) {
    const KvPages pages = pages_of(pool);
    for (const std::int64_t page : {std::int64_t{0}, std::int64_t{1}, pages.num_pages() - 1}) {
      std::uint64_t pieces = 0, bytes = 0;
      const auto runs = pages.runs(page).value();
      for (const CopyRun& run : runs) {
        EXPECT_EQ(run.dst_offset, bytes) << pool.what;
        EXPECT_LE(*src_end(run), pages.layer().padded_bytes()) << pool.what;
        pieces += run.count;
        bytes += run.size_bytes();
      }
      EXPECT_EQ(pieces, pool.pieces) << pool.what;
      EXPECT_EQ(bytes, pages.page_bytes()) << pool.what;
    }
  }
}

TEST(KvPages, GoToAHostPageAndBackElementByElement) {
  for (const Pool& pool : kPools) {
    const KvPages pages = pages_of(pool);
    const TiledLayout& layer = pages.layer();
    if (layer.element_bits() < 8) continue;
    Bytes tiled(layer.padded_bytes()), codes(layer.num_elements() * layer.element_bits() / 8),
        host(pages.page_bytes());
    for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = std::byte(i * 37 + i / 253);
    base::SerialFor loop;
    ASSERT_TRUE(tile(layer, tiled, codes, 0, loop));
    const std::int64_t page = pages.num_pages() / 2;
    apply_nests(host.data(), tiled.data(), pages.to_linear(page).value(), loop);
    EXPECT_TRUE(
        std::equal(host.begin(), host.end(), codes.begin() + static_cast<std::ptrdiff_t>(page * host.size())))
        << pool.what;
    Bytes other(tiled.size());
    for (std::int64_t each = 0; each < pages.num_pages(); ++each) {
      apply_nests(other.data(), codes.data() + static_cast<std::size_t>(each) * host.size(),
                  pages.from_linear(each).value(), loop);
    }
    EXPECT_EQ(other, tiled) << pool.what;
  }
}

TEST(KvPages, RefusePagesThatAreNotThere) {
  const KvPages pages = pages_of(kPools[0]);
  EXPECT_EQ(pages.num_pages(), 65);
  EXPECT_FALSE(pages.runs(65).has_value());
  EXPECT_FALSE(pages.to_linear(-1).has_value());
  EXPECT_FALSE(KvPages::make(pages.layer(), 63).has_value());
  EXPECT_FALSE(KvPages::make(pages.layer(), 0).has_value());
}

}  // namespace
}  // namespace tpusync::layout
