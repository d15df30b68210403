#include "tpusync/host/sizing.h"

#include <gtest/gtest.h>

#include "tpusync/base/bytes.h"

namespace tpusync::host {
namespace {

using base::kGiB;

SizingInput example() {
  return {.geometry = {.piece_bytes = {base::kMiB, base::kMiB}, .num_slots = 4096},
          .table_bytes = 2 * base::kMiB,
          .reserve_bytes = kGiB,
          .limits = {.host_available_bytes = 64 * kGiB,
                     .file_system_total_bytes = 32 * kGiB,
                     .file_system_available_bytes = 16 * kGiB}};
}

TEST(Sizing, TheTightestLimitCountsAndEachIsNamed) {
  SizingInput input = example();
  EXPECT_EQ(size_up(input).available_bytes, 16 * kGiB);
  EXPECT_EQ(size_up(input).missing_bytes(), 0u);
  input.limits.cgroup_limit_bytes = 8 * kGiB;
  input.limits.cgroup_used_bytes = 2 * kGiB;
  const Sizing sizing = size_up(input);
  EXPECT_EQ(sizing.available_bytes, 5 * kGiB);
  EXPECT_EQ(sizing.missing_bytes(), 3 * kGiB + 2 * base::kMiB);
  for (const char* part :
       {"4096 slots of 2.00 MiB + 2.00 MiB of tables = 8.00 GiB", "reserve 1.00 GiB",
        "file system 16.00 GiB free of 32.00 GiB", "host 64.00 GiB available",
        "cgroup 2.00 GiB used of 8.00 GiB", "8.00 GiB needed, 5.00 GiB available", "missing"}) {
    EXPECT_NE(sizing.arithmetic.find(part), std::string::npos) << part << " in: " << sizing.arithmetic;
  }
}

TEST(Sizing, WhatIsPresentIsNotNeededAgain) {
  SizingInput input = example();
  input.present_bytes = 8 * kGiB;
  input.limits.file_system_available_bytes = 0;
  EXPECT_EQ(size_up(input).needed_bytes, 2 * base::kMiB);
  input.present_bytes = 100 * kGiB;
  EXPECT_EQ(size_up(input).missing_bytes(), 0u);
}

TEST(Sizing, TheCapIsOfAllRegionsTogether) {
  SizingInput input = example();
  input.cap_bytes = 10 * kGiB;
  input.regions_bytes = 3 * kGiB;
  EXPECT_EQ(size_up(input).available_bytes, 7 * kGiB);
  input.regions_bytes = 11 * kGiB;
  EXPECT_EQ(size_up(input).available_bytes, 0u);
}

}  // namespace
}  // namespace tpusync::host
