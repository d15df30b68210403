#include "tpusync/index/replay.h"

#include <algorithm>
#include <limits>
#include <set>

#include "tpusync/index/page_list.h"

namespace tpusync::index {

namespace {

constexpr std::size_t kNumCrashes = 20;

std::size_t num_leading(std::span<const PageNumber> path, const ReplayCache& cache) {
  std::size_t num_found = 0;
  while (num_found < path.size() && cache.contains(path[num_found])) ++num_found;
  return num_found;
}

// The engine's own cache. Its head is the youngest of a path.
class Front {
 public:
  Front(std::size_t num_slots, PageNumber num_pages) : num_slots_(num_slots), list_(num_pages) {}

  std::size_t num_leading(std::span<const PageNumber> path) const {
    std::size_t num_found = 0;
    while (num_found < path.size() && list_.contains(path[num_found])) ++num_found;
    return num_found;
  }
  void use(std::span<const PageNumber> path) {
    if (num_slots_ == 0) return;
    for (std::size_t i = path.size(); i-- > 0;) {
      if (list_.contains(path[i])) list_.erase(path[i]);
      list_.push_front(path[i]);
      if (list_.size() > num_slots_) list_.erase(list_.back());
    }
  }

 private:
  const std::size_t num_slots_;
  PageList list_;
};

double hit_rate_of_copy(const Requests& requests, std::size_t begin, std::size_t end,
                        const ReplayCache& cache) {
  std::uint64_t num_pages = 0;
  std::uint64_t num_hits = 0;
  for (std::size_t i = begin; i < end; ++i) {
    num_pages += requests[i].size();
    num_hits += num_leading(requests[i], cache);
  }
  return num_pages == 0 ? 0 : static_cast<double>(num_hits) / static_cast<double>(num_pages);
}

}  // namespace

PageNumber Requests::num_pages() const {
  return pages.empty() ? 0 : *std::max_element(pages.begin(), pages.end()) + 1;
}

ReplayResult replay(const Requests& requests, ReplayCache& cache, const ReplayOptions& options) {
  ReplayResult result;
  Front front(options.front_pages, requests.num_pages());
  std::size_t num_crashes = 0;
  double sum_of_rates = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (options.num_requests_after_crash > 0 && num_crashes + 1 < kNumCrashes &&
        i == requests.size() * (num_crashes + 1) / kNumCrashes) {
      ++num_crashes;
      const std::size_t end = std::min(requests.size(), i + options.num_requests_after_crash);
      sum_of_rates += hit_rate_of_copy(requests, i, end, cache);
    }
    const auto path = requests[i];
    const std::size_t num_hidden = front.num_leading(path);
    result.num_pages += path.size();
    result.num_front_hits += num_hidden;
    result.num_hits += num_leading(path.subspan(num_hidden), cache);
    if (num_hidden < path.size()) cache.use(path, num_hidden);
    front.use(path);
  }
  if (num_crashes > 0) result.hit_rate_after_crash = sum_of_rates / static_cast<double>(num_crashes);
  result.num_written = cache.num_written();
  return result;
}

std::uint64_t num_hits_of_optimum(const Requests& requests, std::size_t num_slots) {
  constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();
  std::vector<std::size_t> next_use(requests.pages.size());
  std::vector<std::size_t> last_seen(requests.num_pages(), kNever);
  for (std::size_t i = requests.size(); i-- > 0;) {
    const auto path = requests[i];
    for (std::size_t j = path.size(); j-- > 0;) {
      next_use[requests.ends[i] - path.size() + j] = last_seen[path[j]];
      last_seen[path[j]] = i;
    }
  }
  // By next use; of the pages that one request needs, the deepest is dropped first.
  using Place = std::pair<std::pair<std::size_t, std::size_t>, PageNumber>;
  std::set<Place> stored;
  std::vector<Place> place_of(requests.num_pages(), Place{{kNever, kNever}, 0});
  std::vector<bool> is_stored(requests.num_pages());
  std::uint64_t num_hits = 0;
  for (std::size_t i = 0, at = 0; i < requests.size(); ++i) {
    const auto path = requests[i];
    for (std::size_t j = 0; j < path.size() && is_stored[path[j]]; ++j) ++num_hits;
    for (std::size_t j = 0; j < path.size(); ++j, ++at) {
      const PageNumber page = path[j];
      if (is_stored[page]) {
        stored.erase(place_of[page]);
      } else if (stored.size() == num_slots) {
        const auto last = std::prev(stored.end());
        is_stored[last->second] = false;
        stored.erase(last);
      }
      place_of[page] = {{next_use[at], j}, page};
      is_stored[page] = true;
      stored.insert(place_of[page]);
    }
  }
  return num_hits;
}

}  // namespace tpusync::index
