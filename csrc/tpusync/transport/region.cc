#include "tpusync/transport/region.h"

#include <fmt/format.h>

#include <atomic>
#include <iterator>

namespace tpusync::transport {

using base::Code;
using base::fail;

base::Result<RegionId> RegionTable::add(std::byte* base, std::size_t length) {
  const auto begin = reinterpret_cast<std::uintptr_t>(base);
  if (base == nullptr || length == 0 || begin + length < begin) {
    return fail(Code::kInvalid, fmt::format("a region of {} bytes at {:#x}", length, begin));
  }
  std::lock_guard lock(mutex_);
  const auto next = by_base_.lower_bound(base);
  const bool hits_next = next != by_base_.end() && next->first < base + length;
  const bool hits_previous =
      next != by_base_.begin() && std::prev(next)->first + std::prev(next)->second->length > base;
  if (hits_next || hits_previous) {
    const Region& other = hits_next ? *next->second : *std::prev(next)->second;
    return fail(Code::kInvalid, fmt::format("{} bytes at {:#x} overlap region {}", length, begin, other.id));
  }
  auto region = std::make_shared<const Region>(Region{++last_id_, base, length});
  by_id_[region->id] = region;
  by_base_[base] = region;
  return region->id;
}

base::Status RegionTable::remove(RegionId id) {
  std::lock_guard lock(mutex_);
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return fail(Code::kNotFound, fmt::format("region {} is not registered", id));
  // Two references are ours, and new ones come from under this lock only.
  if (found->second.use_count() > 2) return fail(Code::kBusy, fmt::format("region {} is in use", id));
  // What others did with the memory before they let go of the region comes before what its owner does next.
  std::atomic_thread_fence(std::memory_order_acquire);
  by_base_.erase(found->second->base);
  by_id_.erase(found);
  return {};
}

RegionRef RegionTable::find(RegionId id) const {
  std::lock_guard lock(mutex_);
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : found->second;
}

RegionRef RegionTable::containing(const std::byte* address, std::size_t length) const {
  std::lock_guard lock(mutex_);
  auto found = by_base_.upper_bound(address);
  if (found == by_base_.begin()) return nullptr;
  const RegionRef& region = std::prev(found)->second;
  const auto offset = static_cast<std::size_t>(address - region->base);
  return offset <= region->length && length <= region->length - offset ? region : nullptr;
}

}  // namespace tpusync::transport
