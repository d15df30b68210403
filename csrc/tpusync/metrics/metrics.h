// Counters, and the samples in which they are read. The name of a sample ends in its unit, or counts things.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tpusync::metrics {

// Thread-safe. Relaxed: a counter orders nothing, it is only read for people.
class Counter {
 public:
  void add(std::uint64_t amount = 1) { value_.fetch_add(amount, std::memory_order_relaxed); }
  std::uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_ = 0;
};

struct Sample {
  std::string name;
  std::variant<std::uint64_t, double, std::string> value;
};

// The value of the integer sample `name`; 0 if there is none.
inline std::uint64_t value_of(const std::vector<Sample>& samples, std::string_view name) {
  for (const Sample& sample : samples) {
    if (sample.name != name) continue;
    if (const auto* value = std::get_if<std::uint64_t>(&sample.value)) return *value;
  }
  return 0;
}

}  // namespace tpusync::metrics
