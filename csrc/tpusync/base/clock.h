// Time as a dependency, so that tests can turn it.
#pragma once

#include <chrono>
#include <cstdint>

namespace tpusync::base {

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual std::chrono::steady_clock::time_point now() const { return std::chrono::steady_clock::now(); }
  // Nanoseconds since 1970; may jump either way when somebody sets the clock of the host.
  virtual std::int64_t unix_ns() const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::system_clock::now().time_since_epoch())
        .count();
  }
};

}  // namespace tpusync::base
