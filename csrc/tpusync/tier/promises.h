// How much of a hit may be promised: no more than the flash tier, at the rate it was measured at, delivers in
// time.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "tpusync/base/clock.h"
#include "tpusync/base/error.h"
#include "tpusync/index/page_key.h"

namespace tpusync::tier {

struct PromiseOptions {
  bool enabled = false;                    // else everything is promised
  double deadline_base_s = 1.0;            // what a prefetch may take, as SGLang counts it,
  double deadline_per_page_s = 0.0;        // and how much more for each page
  double recompute_per_page_s = 0.0;       // a load that is slower than that is declined; 0: unknown
  double safety = 0.8;                     // part of the time that is planned with
  std::chrono::milliseconds sticky{5000};  // a page that was declined stays declined: SGLang asks again
  std::size_t num_sticky_max = 4096;

  // kInvalid with the first rule that is broken, its value and its range.
  base::Status validate() const;
};

// Thread-safe.
class Promises {
 public:
  Promises(const PromiseOptions& options, std::uint64_t page_bytes, const base::Clock& clock)
      : options_(options), page_bytes_(page_bytes), clock_(clock) {}

  // How many of the leading `keys` to promise, `on_flash[i]` telling which have to be read from there.
  std::size_t limit(std::span<const index::PageKey> keys, const std::vector<bool>& on_flash);

  // A batch of `num_pages` took so long.
  void measured(std::size_t num_pages, std::chrono::steady_clock::duration took);

  // Bytes per second; none: nothing was read yet.
  std::optional<double> rate_bytes_per_s() const;

 private:
  const PromiseOptions options_;
  const std::uint64_t page_bytes_;
  const base::Clock& clock_;
  mutable std::mutex mutex_;
  std::optional<double> rate_bytes_per_s_;
  std::map<index::PageKey, std::chrono::steady_clock::time_point> declined_until_;
};

}  // namespace tpusync::tier
