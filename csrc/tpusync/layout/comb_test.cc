#include "tpusync/layout/comb.h"

#include <gtest/gtest.h>

#include <set>

namespace tpusync::layout {
namespace {

std::set<std::int64_t> indices(const Comb& comb) {
  std::set<std::int64_t> out;
  for (std::int64_t i = 0; i < comb.count; ++i) out.insert(comb.first + i * comb.step);
  return out;
}

TEST(Comb, WhatTwoHaveInCommonAndWhatRemains) {
  for (std::int64_t step = 1; step < 7; ++step) {
    for (std::int64_t other = 1; other < 7; ++other) {
      for (std::int64_t first = 0; first < 12; ++first) {
        const Comb a{5, step, 9}, b{first, other, 8};
        const Comb both = intersect(a, b);
        std::set<std::int64_t> expected, rest;
        const auto in_b = indices(b);
        for (const std::int64_t i : indices(a)) (in_b.contains(i) ? expected : rest).insert(i);
        ASSERT_EQ(indices(both), expected) << step << " " << other << " " << first;
        if (both.count == 0) continue;
        std::set<std::int64_t> left;
        for (const Comb& comb : subtract(a, both)) {
          for (const std::int64_t i : indices(comb)) EXPECT_TRUE(left.insert(i).second);
        }
        ASSERT_EQ(left, rest) << step << " " << other << " " << first;
      }
    }
  }
}

TEST(Comb, LargeStepsDoNotOverflow) {
  const std::int64_t large = (std::int64_t{1} << 47) - 115;
  EXPECT_EQ(intersect({0, large, 2}, {0, large - 2, 2}), (Comb{0, large, 1}));
  EXPECT_EQ(indices(intersect({1, 1, large}, {large - 1, 3, 5})), (std::set<std::int64_t>{large - 1}));
}

}  // namespace
}  // namespace tpusync::layout
