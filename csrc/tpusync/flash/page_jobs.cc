#include "tpusync/flash/page_jobs.h"

#include <algorithm>
#include <limits>

namespace tpusync::flash {

using base::Code;
using index::to_number;

index::Ancestry PageRequest::ancestry_of(std::size_t i) const {
  constexpr std::size_t kDepthMax = std::numeric_limits<std::uint16_t>::max();
  index::Ancestry ancestry;
  ancestry.depth = static_cast<std::uint16_t>(std::min(prefix.size() + i, kDepthMax));
  if (i > 0) {
    ancestry.parent = keys[i - 1].short_hash();
  } else if (!prefix.empty()) {
    ancestry.parent = prefix.back().short_hash();
  }
  return ancestry;
}

Code check_start(const Workshop& shop, const PageRequest& request, std::size_t num_pages) {
  if (shop.closing.load(std::memory_order_relaxed) || request.source.cancel_requested()) {
    shop.counters.cancelled.add(num_pages);
    return Code::kCancelled;
  }
  if (request.deadline && shop.clock.now() >= *request.deadline) {
    shop.counters.expired.add(num_pages);
    return Code::kDeadline;
  }
  return Code::kOk;
}

std::vector<Stretch> stretches_of(std::span<const index::SlotId> slots, std::uint64_t page_bytes,
                                  std::uint64_t slot_bytes) {
  const std::size_t num_pages_max =
      page_bytes == slot_bytes ? std::max<std::uint64_t>(1, kStretchBytesMax / slot_bytes) : 1;
  std::vector<Stretch> stretches;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const bool continues = i > 0 && to_number(slots[i]) == to_number(slots[i - 1]) + 1 &&
                           i - stretches.back().begin < num_pages_max;
    if (!continues) stretches.push_back({i, i});
    stretches.back().end = i + 1;
  }
  return stretches;
}

}  // namespace tpusync::flash
