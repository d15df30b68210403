// Pacing of what all peers of an endpoint are sent: a token bucket over bytes.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>

namespace tpusync::transport {

// Thread-safe.
class Pacer {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // 0: no limit. At most `burst_bytes` go out at once after a pause.
  Pacer(std::uint64_t rate_bytes_per_s_max, std::uint64_t burst_bytes)
      : rate_(static_cast<double>(rate_bytes_per_s_max)),
        burst_(static_cast<double>(burst_bytes)),
        tokens_(burst_) {}

  // Takes the bytes and answers `now`, or takes nothing and answers when to try again. One frame always
  // passes a full bucket, however large it is.
  Time take(std::uint64_t bytes, Time now) {
    if (rate_ <= 0) return now;
    std::lock_guard lock(mutex_);
    if (last_ == Time{}) last_ = now;
    tokens_ = std::min(burst_, tokens_ + rate_ * std::chrono::duration<double>(now - last_).count());
    last_ = now;
    const double wanted = std::min(burst_, static_cast<double>(bytes));
    if (tokens_ < wanted) {
      return now +
             std::chrono::duration_cast<Time::duration>(
                 std::chrono::duration<double>((wanted - tokens_) / rate_)) +
             std::chrono::microseconds(1);
    }
    tokens_ -= static_cast<double>(bytes);
    return now;
  }

 private:
  const double rate_;
  const double burst_;
  std::mutex mutex_;
  double tokens_;
  Time last_{};
};

}  // namespace tpusync::transport
