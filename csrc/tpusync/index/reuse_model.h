// What is known of when pages come back: one rate of use per number of uses so far and age, learned from what
// happened.
//
// Pages are told apart by how often they were used, in bands. For each band and age (the uses
// of the store since the page's last use, two steps per octave) the model counts the uses at that age and the
// pages that got that old. Their quotient is the rate of use. Where a band has seen little, the rate over all
// bands stands in, and where nobody has, that of the age before. Nothing here is fitted to a workload:
// without data, and before 32 requests used a page, worth falls with age: the order of least recent use.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace tpusync::index {

// Thread-compatible.
class ReuseModel {
 public:
  static constexpr int kNumBands = 4;  // 1, 2, 3 to 4, more uses
  static constexpr int kNumAges = 64;

  static constexpr int band_of(std::uint32_t num_uses) {
    return std::min<int>(std::bit_width(num_uses - 1), kNumBands - 1);
  }
  static constexpr int age_step(std::uint32_t age) {
    const std::uint64_t number = std::uint64_t{age} + 1;
    const int octave = std::bit_width(number) - 1;
    if (octave == 0) return 0;
    return octave < 32 ? 2 * octave + static_cast<int>((number >> (octave - 1)) & 1) : kNumAges - 1;
  }

  ReuseModel() { refresh(1); }

  // The uses until the next call are of one request: they say one thing, not many.
  void begin_request() { in_request_ = false; }
  // A page of this band was used at this age.
  void add_use(int band, int age);
  // Pages of this band spent so much time at this age, in uses of the store.
  void add_time(int band, int age, double num_page_uses);

  // Computes the rates anew; what was counted so far will weigh `keep` times as much from now on.
  void refresh(double keep);

  // What a page is worth: the uses expected per use of the store, if it is kept just as long as that is best.
  // (The index of Gittins, of a single reuse.)
  float worth(int band, int age) const { return bands_[band].worth[age]; }

 private:
  struct Band {
    std::array<float, kNumAges> uses{};
    std::array<float, kNumAges> passes{};  // pages that came by, times the width of the step in log(age)
    std::array<float, kNumAges> rate{};    // uses per unit of log(age)
    std::array<float, kNumAges> worth{};
  };

  void compute_rates(Band& band, const Band* prior) const;
  static void compute_worth(Band& band);

  std::array<Band, kNumBands> bands_{};
  Band all_{};
  double num_uses_ = 0;
  double num_requests_ = 0;  // that had a use; these two fade
  std::uint64_t num_requests_ever_ = 0;
  bool in_request_ = false;
};

}  // namespace tpusync::index
