// Stops using a disk that fails or is too slow, and finds out when it works again.
//
//   closed --kNumFailures in a row--> open --pause over--> one probe --ok--> closed
//                                       ^------------failed, pause doubled----'
#pragma once

#include <chrono>
#include <mutex>
#include <string>

#include "tpusync/base/clock.h"

namespace tpusync::flash {

// Thread-safe.
class Breaker {
 public:
  static constexpr int kNumFailures = 8;
  static constexpr std::chrono::milliseconds kPauseMin{1000};
  static constexpr std::chrono::milliseconds kPauseMax{60'000};

  // `what` it is that stops, for the log.
  Breaker(const base::Clock& clock, std::string what) : clock_(clock), what_(std::move(what)) {}

  // False: do not try now. After a true the outcome is to be reported.
  bool allow();
  void succeeded();
  void failed();
  bool open() const;

 private:
  const base::Clock& clock_;
  const std::string what_;
  mutable std::mutex mutex_;
  int num_failures_ = 0;
  std::chrono::milliseconds pause_{0};  // 0: closed
  std::chrono::steady_clock::time_point next_probe_{};
};

}  // namespace tpusync::flash
