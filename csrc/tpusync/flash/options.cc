#include "tpusync/flash/options.h"

#include <fmt/format.h>

namespace tpusync::flash {

using base::Code;

namespace {
constexpr std::uint64_t kPageBytesMax = 0xffffffffull;
constexpr int kNumThreadsMax = 256;
}  // namespace

base::Status FlashOptions::validate() const {
  if (path.empty() || path.front() != '/') {
    return base::fail(Code::kInvalid, fmt::format("path: '{}' is not absolute", path));
  }
  if (page_bytes < 1 || page_bytes > kPageBytesMax) {
    return base::fail(Code::kInvalid,
                      fmt::format("page_bytes: {}, allowed are 1 to {}", page_bytes, kPageBytesMax));
  }
  const std::uint64_t capacity_min = base::round_up(page_bytes, kSlotAlignBytes);
  if (capacity_bytes && *capacity_bytes < capacity_min) {
    return base::fail(Code::kInvalid,
                      fmt::format("capacity_bytes: {}, at least one page of {} bytes must fit",
                                  *capacity_bytes, capacity_min));
  }
  if (num_threads < 0 || num_threads > kNumThreadsMax) {
    return base::fail(Code::kInvalid,
                      fmt::format("num_threads: {}, allowed are 0 to {}", num_threads, kNumThreadsMax));
  }
  if (ttl && ttl->count() < 1) {
    return base::fail(Code::kInvalid, fmt::format("ttl: {} s, allowed are 1 and more", ttl->count()));
  }
  if (latency_budget.count() < 1) {
    return base::fail(Code::kInvalid,
                      fmt::format("latency_budget: {} ms, allowed are 1 and more", latency_budget.count()));
  }
  return {};
}

}  // namespace tpusync::flash
