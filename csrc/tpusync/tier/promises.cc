#include "tpusync/tier/promises.h"

#include <fmt/format.h>

namespace tpusync::tier {

namespace {
constexpr double kWeightOfTheLatest = 0.3;
constexpr double kSecondsMax = 86400;
}  // namespace

base::Status PromiseOptions::validate() const {
  const struct {
    const char* key;
    double value;
  } figures[] = {{"deadline_base_s", deadline_base_s},
                 {"deadline_per_page_s", deadline_per_page_s},
                 {"recompute_per_page_s", recompute_per_page_s}};
  for (const auto& [key, value] : figures) {
    if (value >= 0 && value <= kSecondsMax) continue;
    return base::fail(base::Code::kInvalid,
                      fmt::format("{}: {}, allowed are 0 to {}", key, value, kSecondsMax));
  }
  if (enabled && deadline_base_s == 0 && deadline_per_page_s == 0) {
    return base::fail(
        base::Code::kInvalid,
        "deadline_base_s: 0 with deadline_per_page_s 0 leaves no time for any page; one of them "
        "must be above 0");
  }
  if (!(safety > 0 && safety <= 1)) {
    return base::fail(base::Code::kInvalid, fmt::format("safety: {}, allowed are above 0 to 1", safety));
  }
  return {};
}

std::size_t Promises::limit(std::span<const index::PageKey> keys, const std::vector<bool>& on_flash) {
  if (!options_.enabled) return keys.size();
  std::lock_guard lock(mutex_);
  const auto now = clock_.now();
  std::size_t num_flash = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (!on_flash[i]) continue;
    const auto declined = declined_until_.find(keys[i]);
    if (declined != declined_until_.end()) {
      if (now < declined->second) return i;
      declined_until_.erase(declined);
    }
    ++num_flash;
    if (!rate_bytes_per_s_) continue;
    const double needed_s = static_cast<double>(num_flash * page_bytes_) / *rate_bytes_per_s_;
    const double pages = static_cast<double>(i + 1);
    const double allowed_s =
        options_.safety * (options_.deadline_base_s + pages * options_.deadline_per_page_s);
    const bool late = needed_s > allowed_s;
    const bool slower = options_.recompute_per_page_s > 0 && needed_s > pages * options_.recompute_per_page_s;
    if (!late && !slower) continue;
    if (declined_until_.size() >= options_.num_sticky_max) declined_until_.clear();
    declined_until_[keys[i]] = now + options_.sticky;
    return i;
  }
  return keys.size();
}

void Promises::measured(std::size_t num_pages, std::chrono::steady_clock::duration took) {
  const double seconds = std::chrono::duration<double>(took).count();
  if (num_pages == 0 || seconds <= 0) return;
  const double rate = static_cast<double>(num_pages * page_bytes_) / seconds;
  std::lock_guard lock(mutex_);
  rate_bytes_per_s_ =
      rate_bytes_per_s_ ? *rate_bytes_per_s_ * (1 - kWeightOfTheLatest) + rate * kWeightOfTheLatest : rate;
}

std::optional<double> Promises::rate_bytes_per_s() const {
  std::lock_guard lock(mutex_);
  return rate_bytes_per_s_;
}

}  // namespace tpusync::tier
