// Replays requests against a cache of pages without any IO: what a policy would have hit.
//
// A request is a path of pages, head first. What it finds are its leading pages; the others are offered to
// the cache. With a front (the engine's own cache in HBM and DRAM, least recently used) the cache learns only
// of requests that the front does not hold as a whole, and the pages that it holds are named as the prefix.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace tpusync::index {

using PageNumber = std::uint32_t;

// A value. `pages` of all requests, one behind the other; request i ends before `ends[i]`. The page before a
// page in its path is always the same.
struct Requests {
  std::vector<PageNumber> pages;
  std::vector<std::size_t> ends;

  std::size_t size() const { return ends.size(); }
  std::span<const PageNumber> operator[](std::size_t i) const {
    const std::size_t begin = i == 0 ? 0 : ends[i - 1];
    return std::span(pages).subspan(begin, ends[i] - begin);
  }
  PageNumber num_pages() const;  // one more than the largest number
};

// Thread-compatible.
class ReplayCache {
 public:
  virtual ~ReplayCache() = default;
  virtual bool contains(PageNumber page) const = 0;
  // `path` without its first `num_hidden` pages was looked up, then what was missing of it was offered.
  virtual void use(std::span<const PageNumber> path, std::size_t num_hidden) = 0;
  std::uint64_t num_written() const { return num_written_; }

 protected:
  std::uint64_t num_written_ = 0;
};

enum class ReplayPolicy {
  kReuse,    // PrefixIndex with make_reuse_order(): the engine's own
  kLeafLru,  // PrefixIndex with make_lru_order()
  kLru,      // pages by themselves, least recently used; hidden pages are not touched
  kS3Fifo,   // pages by themselves
};
std::unique_ptr<ReplayCache> make_replay_cache(ReplayPolicy policy, const Requests& requests,
                                               std::size_t num_slots);

struct ReplayOptions {
  std::size_t front_pages = 0;  // 0: no front
  // A crash after each twentieth of the requests but the last: what the next so many requests find in the
  // cache alone, as it was then. 0: no crash.
  std::size_t num_requests_after_crash = 0;
};
struct ReplayResult {
  std::uint64_t num_pages = 0;
  std::uint64_t num_front_hits = 0;
  std::uint64_t num_hits = 0;  // of the cache
  std::uint64_t num_written = 0;
  double hit_rate_after_crash = 0;  // mean over the crashes
};
ReplayResult replay(const Requests& requests, ReplayCache& cache, const ReplayOptions& options);

// The hits of a cache that knows the future: it drops what is used again last. Without a front.
std::uint64_t num_hits_of_optimum(const Requests& requests, std::size_t num_slots);

}  // namespace tpusync::index
