#include "tpusync/flash/write_budget.h"

#include <algorithm>

namespace tpusync::flash {

namespace {
constexpr std::uint64_t kChunkBytesMax = 256 * base::kMiB;
constexpr std::uint64_t kNumChunksPerDay = 256;
// A spent budget accrues slowly: asking the ledger for every page would only cost system calls.
constexpr std::chrono::milliseconds kRetry{500};
}  // namespace

WriteBudget::WriteBudget(Node& node, const base::Clock& clock) : node_(node), clock_(clock) {}

WriteBudget::~WriteBudget() {
  node_.return_budget(leased_bytes_);
}

bool WriteBudget::take(std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  if (leased_bytes_ < bytes) {
    if (clock_.now() < next_try_) return false;
    const std::uint64_t chunk = std::min(kChunkBytesMax, node_.budget_bytes_per_day() / kNumChunksPerDay);
    leased_bytes_ += node_.lease_budget(std::max(chunk, bytes - leased_bytes_));
    if (leased_bytes_ < bytes) next_try_ = clock_.now() + kRetry;
  }
  if (leased_bytes_ < bytes) return false;
  leased_bytes_ -= bytes;
  return true;
}

void WriteBudget::put_back(std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  leased_bytes_ += bytes;
}

std::uint64_t WriteBudget::left_bytes() {
  const std::uint64_t in_ledger = node_.budget_left_bytes();
  std::lock_guard lock(mutex_);
  return leased_bytes_ + in_ledger;
}

}  // namespace tpusync::flash
