#include "tpusync/index/reuse_model.h"

#include <gtest/gtest.h>

#include <cmath>

namespace tpusync::index {
namespace {

constexpr int kNumAgesTaught = 40;

double width_of(int age) {
  return std::ldexp(0.5, age / 2);
}

// `num_pages` reach each age; `num_uses` of those that get to `age_of_use` are used there and leave.
void teach(ReuseModel& model, int band, double num_pages, std::uint32_t age_of_use, int num_uses) {
  const int step_of_use = ReuseModel::age_step(age_of_use);
  for (int age = 0; age < kNumAgesTaught; ++age) {
    model.add_time(band, age, (age <= step_of_use ? num_pages : num_pages - num_uses) * width_of(age));
  }
  for (int i = 0; i < num_uses; ++i) {
    model.begin_request();  // these uses are independent
    model.add_use(band, step_of_use);
  }
}

TEST(ReuseModel, StepsAreHalvesOfOctavesAndNeverGoBack) {
  EXPECT_EQ(ReuseModel::age_step(0), 0);
  EXPECT_EQ(ReuseModel::age_step(1), 2);
  EXPECT_EQ(ReuseModel::age_step(2), 3);
  EXPECT_EQ(ReuseModel::age_step(3), 4);
  EXPECT_EQ(ReuseModel::age_step(1023), 20);
  EXPECT_EQ(ReuseModel::age_step(1535), 21);
  EXPECT_EQ(ReuseModel::age_step(0xffffffff), ReuseModel::kNumAges - 1);
  for (std::uint32_t age = 0; age < 5000; ++age)
    EXPECT_LE(ReuseModel::age_step(age), ReuseModel::age_step(age + 1));
}

TEST(ReuseModel, BandsPartTheNumbersOfUses) {
  int last = 0;
  for (std::uint32_t num_uses = 1; num_uses < 256; ++num_uses) {
    const int band = ReuseModel::band_of(num_uses);
    EXPECT_TRUE(band == last || band == last + 1) << num_uses;
    last = band;
  }
  EXPECT_EQ(ReuseModel::band_of(1), 0);
  EXPECT_EQ(ReuseModel::band_of(2), 1);
  EXPECT_EQ(last, ReuseModel::kNumBands - 1);
}

TEST(ReuseModel, KnowingNothingPrefersWhatWasUsedLast) {
  const ReuseModel model;
  for (int band = 0; band < ReuseModel::kNumBands; ++band) {
    for (int age = 1; age < ReuseModel::kNumAges; ++age)
      EXPECT_LT(model.worth(band, age), model.worth(band, age - 1)) << age;
  }
}

TEST(ReuseModel, AFewRequestsTeachNothing) {
  const ReuseModel unknowing;
  ReuseModel model;
  const int age = ReuseModel::age_step(4000);
  for (int request = 0; request < 32; ++request) {
    model.add_time(0, age, 1000);
    model.refresh(1);
    EXPECT_EQ(model.worth(0, age), unknowing.worth(0, age)) << request;
    model.begin_request();
    for (int i = 0; i < 1000; ++i) model.add_use(0, age);
  }
  model.refresh(1);
  EXPECT_GT(model.worth(0, age), 2 * unknowing.worth(0, age));
}

TEST(ReuseModel, PagesThatAlwaysReturnLateAreWorthMoreTheOlderTheyAreUntilThen) {
  ReuseModel model;
  teach(model, 0, 10'000, 4000, 9'000);
  model.refresh(1);
  const auto worth_at = [&](std::uint32_t age) { return model.worth(0, ReuseModel::age_step(age)); };
  EXPECT_GT(worth_at(2000), worth_at(1000));
  EXPECT_GT(worth_at(1000), worth_at(100));
  EXPECT_LT(worth_at(40'000), worth_at(4000) / 4);
}

TEST(ReuseModel, TheBandThatReturnsMoreOftenIsWorthMore) {
  ReuseModel model;
  teach(model, 1, 10'000, 200, 6'000);
  teach(model, 0, 10'000, 200, 600);
  model.refresh(1);
  EXPECT_GT(model.worth(1, 0), 3 * model.worth(0, 0));
}

TEST(ReuseModel, ABandWithoutHistoryIsWorthWhatAllAre) {
  ReuseModel model;
  teach(model, 1, 10'000, 200, 5'000);
  model.refresh(1);
  for (int age = 0; age < ReuseModel::age_step(150); ++age)
    EXPECT_NEAR(model.worth(3, age), model.worth(1, age), 0.1F * model.worth(1, age)) << age;
}

TEST(ReuseModel, UsesOfOneRequestSayLessThanThoseOfMany) {
  ReuseModel together;
  ReuseModel apart;
  teach(apart, 0, 1000, 200, 100);
  teach(apart, 1, 1000, 200, 500);
  for (int age = 0; age < kNumAgesTaught; ++age) {
    for (int band : {0, 1}) together.add_time(band, age, 1000 * width_of(age));
  }
  together.begin_request();
  for (int i = 0; i < 600; ++i) together.add_use(i % 6 == 0 ? 0 : 1, ReuseModel::age_step(200));
  together.refresh(1);
  apart.refresh(1);
  EXPECT_LT(together.worth(1, 0) / together.worth(0, 0), apart.worth(1, 0) / apart.worth(0, 0));
}

TEST(ReuseModel, ForgettingLetsNewHistoryDecide) {
  ReuseModel model;
  teach(model, 0, 10'000, 200, 9'000);
  model.refresh(1e-3);
  const float before = model.worth(0, 0);
  teach(model, 0, 10'000, 200, 90);
  model.refresh(1);
  EXPECT_LT(model.worth(0, 0), before / 5);
}

}  // namespace
}  // namespace tpusync::index
