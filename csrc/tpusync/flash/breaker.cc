#include "tpusync/flash/breaker.h"

#include <fmt/format.h>

#include <algorithm>

#include "tpusync/base/log.h"

namespace tpusync::flash {

bool Breaker::allow() {
  std::lock_guard lock(mutex_);
  if (pause_.count() == 0) return true;
  if (clock_.now() < next_probe_) return false;
  next_probe_ = clock_.now() + pause_;  // one probe per pause, also when its outcome never comes
  return true;
}

void Breaker::succeeded() {
  std::lock_guard lock(mutex_);
  if (pause_.count() > 0) {
    base::log(base::LogLevel::kInfo, fmt::format("the disk of the store works again; {} goes on", what_));
  }
  num_failures_ = 0;
  pause_ = {};
}

void Breaker::failed() {
  std::lock_guard lock(mutex_);
  if (++num_failures_ < kNumFailures) return;
  const bool was_closed = pause_.count() == 0;
  pause_ = was_closed ? kPauseMin : std::min(pause_ * 2, kPauseMax);
  next_probe_ = clock_.now() + pause_;
  if (was_closed) {
    base::log(base::LogLevel::kWarning,
              fmt::format("the disk of the store keeps failing, or is too slow; {} pauses", what_));
  }
}

bool Breaker::open() const {
  std::lock_guard lock(mutex_);
  return pause_.count() > 0;
}

}  // namespace tpusync::flash
