#include "tpusync/layout/copy_run.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

namespace tpusync::layout {
namespace {

std::vector<CopyRun> merged(std::initializer_list<CopyRun> runs) {
  std::vector<CopyRun> out;
  for (const CopyRun& run : runs) append_merged(out, canonical(run));
  return out;
}

TEST(CopyRun, CanonicalFormHasOnePieceWhereThereIsNoGap) {
  const CopyRun run{
      .src_offset = 8, .dst_offset = 16, .length = 4, .count = 3, .src_stride = 4, .dst_stride = 4};
  EXPECT_EQ(canonical(run), (CopyRun{.src_offset = 8, .dst_offset = 16, .length = 12}));
}

TEST(CopyRun, CanonicalFormKeepsAGapOfEitherSide) {
  const CopyRun run{.length = 4, .count = 3, .src_stride = 4, .dst_stride = 8};
  EXPECT_EQ(canonical(run), run);
}

TEST(CopyRun, NeighboursBecomeOnePiece) {
  EXPECT_EQ(merged({{.src_offset = 0, .dst_offset = 100, .length = 4},
                    {.src_offset = 4, .dst_offset = 104, .length = 6}}),
            (std::vector<CopyRun>{{.src_offset = 0, .dst_offset = 100, .length = 10}}));
}

TEST(CopyRun, EqualPiecesAtOneStrideBecomeOneRun) {
  const auto runs = merged({{.src_offset = 0, .dst_offset = 0, .length = 4},
                            {.src_offset = 8, .dst_offset = 4, .length = 4},
                            {.src_offset = 16, .dst_offset = 8, .length = 4}});
  EXPECT_EQ(runs, (std::vector<CopyRun>{{.length = 4, .count = 3, .src_stride = 8, .dst_stride = 4}}));
}

TEST(CopyRun, WhatGoesBackwardsStaysApart) {
  const auto runs = merged(
      {{.src_offset = 8, .dst_offset = 0, .length = 4}, {.src_offset = 0, .dst_offset = 4, .length = 4}});
  EXPECT_EQ(runs.size(), 2u);
}

TEST(CopyRun, NothingIsNotAppended) {
  EXPECT_TRUE(merged({{.length = 0}, {.length = 4, .count = 0}}).empty());
}

TEST(CopyRun, EndsAreNulloptWhereTheyDoNotFit) {
  EXPECT_EQ(src_end({.src_offset = 10, .length = 4, .count = 3, .src_stride = 100}), 214u);
  EXPECT_EQ(dst_end({.dst_offset = 10, .length = 4}), 14u);
  EXPECT_EQ(dst_end({.dst_offset = UINT64_MAX, .length = 1}), std::nullopt);
  EXPECT_EQ(src_end({.length = 1, .count = 3, .src_stride = UINT64_MAX / 2 + 1}), std::nullopt);
}

// The bytes that runs move, as a list of (from, to).
std::vector<std::pair<std::uint64_t, std::uint64_t>> moves(const std::vector<CopyRun>& runs) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> out;
  for (const CopyRun& run : runs) {
    for (std::uint64_t i = 0; i < run.count; ++i) {
      for (std::uint64_t j = 0; j < run.length; ++j) {
        out.emplace_back(run.src_offset + i * run.src_stride + j, run.dst_offset + i * run.dst_stride + j);
      }
    }
  }
  return out;
}

TEST(CopyRun, CutRunsMoveTheSameBytesInSmallerRuns) {
  const std::vector<CopyRun> runs{
      {.src_offset = 3, .dst_offset = 5, .length = 100},
      {.src_offset = 200, .dst_offset = 300, .length = 7, .count = 11, .src_stride = 9, .dst_stride = 13}};
  for (const std::uint64_t limit : {1, 7, 8, 30, 1000}) {
    std::vector<CopyRun> cut;
    cut_runs(runs, limit, cut);
    EXPECT_EQ(moves(cut), moves(runs)) << limit;
    for (const CopyRun& run : cut) EXPECT_LE(run.size_bytes(), std::max<std::uint64_t>(limit, 7));
  }
}

TEST(CopyRun, CopiesEveryPieceAndNothingElse) {
  std::vector<std::byte> src(40000);
  for (std::size_t i = 0; i < src.size(); ++i) src[i] = std::byte(i * 7 + i / 256);
  for (const std::uint64_t length : {1, 64, 128, 200, 256, 257, 1024, 3000}) {
    const std::vector<CopyRun> runs{{.src_offset = 5,
                                     .dst_offset = 9,
                                     .length = length,
                                     .count = 9,
                                     .src_stride = length + 3,
                                     .dst_stride = length + 2}};
    const std::vector<std::byte> dst(40000, std::byte{0xEE});
    auto expected = dst;
    for (const auto& [from, to] : moves(runs)) expected[to] = src[from];
    for (const Stores stores : {Stores::kCached, Stores::kStreaming}) {
      auto got = dst;
      copy_run(got.data(), src.data(), runs[0], stores);
      streaming_fence();
      EXPECT_EQ(got, expected) << length;
    }
  }
}

}  // namespace
}  // namespace tpusync::layout
