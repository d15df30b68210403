#include "tpusync/layout/reshard.h"

#include <gtest/gtest.h>

#include "tpusync/layout/convert.h"

namespace tpusync::layout {
namespace {

using base::Code;
using Bytes = std::vector<std::byte>;

// The KV heads (dimension 2) of a pool over ranks, each with a layout of its own.
ShardSpec heads_over(std::int64_t ranks, std::string_view text, const Dims& dims) {
  const DType dtype = parse_dtype("BF16").value();
  ShardSpec spec{dims, dtype, {}};
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    Dims origin(dims.size()), extent = dims;
    extent[2] /= ranks;
    origin[2] = rank * extent[2];
    spec.shards.push_back({origin, extent, {}, TiledLayout::parse(text, dtype, extent).value(), {}});
  }
  return spec;
}

struct Buffers {
  explicit Buffers(const ReshardPlan& plan) {
    for (const std::uint64_t size : plan.src_bytes) {
      Bytes& bytes = src.emplace_back(size);
      for (std::size_t i = 0; i < size; ++i) bytes[i] = std::byte(i * 37 + i / 253 + 1);
    }
    for (const std::uint64_t size : plan.dst_bytes) dst.emplace_back(size, std::byte{0xA5});
    for (const Bytes& bytes : src) sources.emplace_back(bytes);
    for (Bytes& bytes : dst) destinations.emplace_back(bytes);
  }

  std::vector<Bytes> src, dst;
  std::vector<std::span<const std::byte>> sources;
  std::vector<std::span<std::byte>> destinations;
};

const Dims kDims{2, 20, 8, 100};  // 100 of 128 lanes: every tile has padding

TEST(Reshard, PiecesInAnyOrderAreTheWhole) {
  const auto plan = plan_reshard(heads_over(4, "{3,2,1,0:T(2,128)(2,1)}", kDims),
                                 heads_over(2, "{3,2,1,0:T(4,128)(2,1)}", kDims))
                        .value();
  Buffers whole(plan), pieces(plan);
  base::SerialFor loop;
  ASSERT_TRUE(plan.apply(whole.destinations, whole.sources, loop));
  ASSERT_TRUE(plan.check(pieces.destinations, pieces.sources));
  for (const std::size_t piece : {0u, 6u, 2u, 5u, 1u, 3u, 4u}) {
    plan.apply_piece(pieces.destinations, pieces.sources, piece, 7);
  }
  EXPECT_EQ(pieces.dst, whole.dst);
  // A part of it is missing: then it is not the whole.
  Buffers most(plan);
  for (const std::size_t piece : {0u, 1u, 2u, 4u, 5u, 6u}) {
    plan.apply_piece(most.destinations, most.sources, piece, 7);
  }
  EXPECT_NE(most.dst, whole.dst);
}

TEST(Reshard, ThereAndBackIsIdentityAndPaddingIsZero) {
  const auto one = heads_over(1, "{3,2,1,0:T(8,128)(2,1)}", kDims),
             eight = heads_over(8, "{3,1,2,0:T(8,128)(2,1)}", kDims);
  const auto there = plan_reshard(eight, one).value(), back = plan_reshard(one, eight).value();
  EXPECT_EQ(there.moved_bits(), std::uint64_t{2} * 20 * 8 * 100 * 16);
  Buffers first(there), second(back);
  base::SerialFor loop;
  ASSERT_TRUE(there.apply(first.destinations, first.sources, loop));
  std::vector<std::span<const std::byte>> middle(first.dst.begin(), first.dst.end());
  ASSERT_TRUE(back.apply(second.destinations, middle, loop));
  Bytes mask(first.src[0].size());
  ASSERT_TRUE(live_mask(one.shards[0].layout, mask));
  for (std::size_t i = 0; i < mask.size(); ++i)
    ASSERT_EQ(second.dst[0][i], first.src[0][i] & mask[i]) << "byte " << i;
}

TEST(Reshard, HeadsThatGoToSeveralRanksAreThoseOfEachRankAlone) {
  const Dims dims{3, 33, 8, 128};
  const auto one = heads_over(1, "{3,2,1,0:T(8,128)(2,1)}", dims);
  for (const std::int64_t ranks : {2, 4}) {
    const auto all =
        heads_over(ranks, ranks == 2 ? "{3,2,1,0:T(4,128)(2,1)}" : "{3,2,1,0:T(2,128)(2,1)}", dims);
    const auto plan = plan_reshard(all, one).value();
    Buffers together(plan), pieces(plan);
    base::SerialFor loop;
    ASSERT_TRUE(plan.apply(together.destinations, together.sources, loop));
    for (std::size_t piece = 0; piece < 5; ++piece)
      plan.apply_piece(pieces.destinations, pieces.sources, piece, 5);
    EXPECT_EQ(pieces.dst, together.dst);
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      ShardSpec alone{dims, all.dtype, {all.shards[static_cast<std::size_t>(rank)]}};
      const auto part = plan_reshard(alone, one).value();
      Buffers single(part);
      ASSERT_TRUE(part.apply(single.destinations, single.sources, loop));
      EXPECT_EQ(single.dst[0], together.dst[static_cast<std::size_t>(rank)]);
    }
  }
}

TEST(Reshard, APlanSurvivesItsBytes) {
  const auto plan = plan_reshard(heads_over(8, "{3,1,2,0:T(8,128)(2,1)}", kDims),
                                 heads_over(1, "{3,2,1,0:T(8,128)(2,1)}", kDims))
                        .value();
  auto bytes = encode_plan(plan);
  EXPECT_EQ(decode_plan(bytes).value(), plan);
  bytes[20] ^= std::byte{1};
  EXPECT_EQ(decode_plan(bytes).error().code, Code::kCorrupt);
}

}  // namespace
}  // namespace tpusync::layout
