#include "tpusync/index/reuse_model.h"

#include <algorithm>
#include <cmath>

namespace tpusync::index {

namespace {

// Neighbouring ages share what they know: a triangle that reaches over this many steps to each side.
constexpr int kSmoothing = 3;
// All bands together speak for one as loudly as this many requests' worth of uses.
constexpr double kPriorRequests = 4;
// Uses of fewer requests than this teach nothing: a handful of conversations would decide for all that
// follow.
constexpr std::uint64_t kRequestsToLearnFrom = 32;
// Where nothing is known, so many uses are expected per unit of log(age): half of what is seen at one age is
// used again before it is four times as old. Any positive number gives the order of least recent use.
constexpr float kRateUnknown = 0.5;
constexpr double kRateMax = 20;

double begin_of(int age) {
  return std::ldexp(age % 2 == 0 ? 1.0 : 1.5, age / 2);
}

struct Step {
  double width;
  double log_width;
};

const std::array<Step, ReuseModel::kNumAges>& steps() {
  static const auto table = [] {
    std::array<Step, ReuseModel::kNumAges> steps{};
    for (int age = 0; age < ReuseModel::kNumAges; ++age) {
      steps[age] = {begin_of(age + 1) - begin_of(age), std::log(begin_of(age + 1) / begin_of(age))};
    }
    return steps;
  }();
  return table;
}

}  // namespace

void ReuseModel::add_use(int band, int age) {
  ++num_uses_;
  if (!in_request_) {
    ++num_requests_;
    ++num_requests_ever_;
  }
  in_request_ = true;
  ++bands_[band].uses[age];
  ++all_.uses[age];
}

void ReuseModel::add_time(int band, int age, double num_page_uses) {
  const auto passes = static_cast<float>(num_page_uses / steps()[age].width * steps()[age].log_width);
  bands_[band].passes[age] += passes;
  all_.passes[age] += passes;
}

void ReuseModel::refresh(double keep) {
  compute_rates(all_, nullptr);
  for (Band& band : bands_) {
    compute_rates(band, &all_);
    compute_worth(band);
  }
  num_uses_ *= keep;
  num_requests_ *= keep;
  const auto forget = [keep](Band& band) {
    for (float& uses : band.uses) uses *= static_cast<float>(keep);
    for (float& passes : band.passes) passes *= static_cast<float>(keep);
  };
  forget(all_);
  for (Band& band : bands_) forget(band);
}

void ReuseModel::compute_rates(Band& band, const Band* prior) const {
  if (num_requests_ever_ < kRequestsToLearnFrom) return band.rate.fill(kRateUnknown);
  const double strength = kPriorRequests * num_uses_ / num_requests_;
  double younger = kRateUnknown;
  for (int age = 0; age < kNumAges; ++age) {
    double uses = 0;
    double passes = 0;
    for (int at = std::max(age - kSmoothing, 0); at <= std::min(age + kSmoothing, kNumAges - 1); ++at) {
      const double weight = 1 - std::abs(at - age) / (kSmoothing + 1.0);
      uses += weight * band.uses[at];
      passes += weight * band.passes[at];
    }
    const double expected = prior == nullptr ? younger : prior->rate[age];
    younger = std::min((uses + strength * expected) / (passes + strength), kRateMax);
    band.rate[age] = static_cast<float>(younger);
  }
}

// From the oldest age down: a step joins the stretch of older ones behind it as long as that is worth more.
void ReuseModel::compute_worth(Band& band) {
  struct Stretch {
    double uses;
    double time;
    double unused;  // the part that gets past it without a use
    double worth() const { return uses / time; }
  };
  std::array<Stretch, kNumAges> stretches;
  int num_stretches = 0;
  for (int age = kNumAges; age-- > 0;) {
    const double hazard = std::max<double>(band.rate[age], 1e-9) * steps()[age].log_width;
    const double used = -std::expm1(-hazard);
    Stretch now{used, steps()[age].width * used / hazard, 1 - used};
    for (; num_stretches > 0 && stretches[num_stretches - 1].worth() > now.worth(); --num_stretches) {
      const Stretch& next = stretches[num_stretches - 1];
      now.uses += now.unused * next.uses;
      now.time += now.unused * next.time;
      now.unused *= next.unused;
    }
    stretches[num_stretches++] = now;
    band.worth[age] = static_cast<float>(now.worth());
  }
}

}  // namespace tpusync::index
