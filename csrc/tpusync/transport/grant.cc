#include "tpusync/transport/grant.h"

#include <fmt/format.h>

#include <algorithm>

#include "tpusync/wire/auth.h"

namespace tpusync::transport {

using base::Code;
using base::fail;
using base::Result;

// One lock guards both the number of landings and whether it was revoked, so that the two cannot miss each
// other.
struct Grant {
  GrantId id = 0;
  std::vector<Range> ranges;  // sorted, no two touch
  // Read only by landings, and empty once the last one has ended after a revocation.
  std::unordered_map<RegionId, RegionRef> regions;
  std::optional<wire::EndpointId> holder;

  mutable std::mutex mutex;
  int landings = 0;
  bool revoked = false;
  exec::TicketSource gone;
};

namespace {

bool before(const Range& a, const Range& b) {
  return std::pair(a.region, a.offset) < std::pair(b.region, b.offset);
}

Result<std::vector<Range>> normalise(std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end(), before);
  std::vector<Range> out;
  for (const Range& range : ranges) {
    if (out.empty() || out.back().region != range.region ||
        out.back().offset + out.back().length < range.offset) {
      out.push_back(range);
    } else if (out.back().offset + out.back().length == range.offset) {
      out.back().length += range.length;
    } else {
      return fail(Code::kInvalid, fmt::format("region {} offset {}: ranges of one grant overlap",
                                              range.region, range.offset));
    }
  }
  return out;
}

// The address of an entry; null when it is not inside one range of the grant.
std::byte* resolve(const Grant& grant, const wire::DataEntry& entry) {
  const Range key{entry.region, entry.offset, 0};
  auto after = std::upper_bound(grant.ranges.begin(), grant.ranges.end(), key, before);
  if (after == grant.ranges.begin()) return nullptr;
  const Range& range = *std::prev(after);
  if (range.region != entry.region) return nullptr;
  const std::uint64_t skip = entry.offset - range.offset;
  if (skip > range.length || entry.length > range.length - skip) return nullptr;
  return grant.regions.at(entry.region)->base + entry.offset;
}

}  // namespace

Landing& Landing::operator=(Landing&& other) noexcept {
  end();
  table_ = other.table_;
  grant_ = std::move(other.grant_);
  targets = std::move(other.targets);
  return *this;
}

bool Landing::revoked() const {
  std::lock_guard lock(grant_->mutex);
  return grant_->revoked;
}

void Landing::end() {
  if (!grant_) return;
  bool last = false;
  {
    std::lock_guard lock(grant_->mutex);
    last = --grant_->landings == 0 && grant_->revoked;
  }
  targets.clear();
  std::shared_ptr<Grant> grant = std::move(grant_);
  if (last) table_->forget(std::move(grant));
}

Result<GrantId> GrantTable::open(std::vector<Range> ranges, std::optional<wire::EndpointId> holder) {
  auto grant = std::make_shared<Grant>();
  for (const Range& range : ranges) {
    RegionRef& region = grant->regions[range.region];
    if (!region) region = regions_.find(range.region);
    if (!region) return fail(Code::kInvalid, fmt::format("region {} is not registered", range.region));
    if (range.length == 0 || range.offset > region->length || range.length > region->length - range.offset) {
      return fail(Code::kInvalid, fmt::format("region {} of {} bytes: no range {}+{}", range.region,
                                              region->length, range.offset, range.length));
    }
  }
  Result<std::vector<Range>> normal = normalise(std::move(ranges));
  if (!normal) return tl::unexpected(std::move(normal).error());
  grant->ranges = *std::move(normal);
  grant->holder = holder;
  std::lock_guard lock(mutex_);
  if (open_.size() >= num_grants_max_)
    return fail(Code::kBusy, fmt::format("num_grants_max: {} are open", open_.size()));
  GrantId id = wire::random_number();
  while (!open_.emplace(id, grant).second) id = wire::random_number();
  grant->id = id;
  return id;
}

void GrantTable::forget(std::shared_ptr<Grant> grant) {
  const exec::TicketSource gone = grant->gone;
  {
    std::lock_guard lock(mutex_);
    open_.erase(grant->id);
  }
  // Somebody who came too late to land may still hold the grant for a moment; its regions are free all the
  // same.
  grant->regions.clear();
  gone.finish_part({});
}

exec::Ticket GrantTable::revoke(GrantId id) {
  std::shared_ptr<Grant> grant;
  {
    std::lock_guard lock(mutex_);
    const auto found = open_.find(id);
    if (found == open_.end()) return {};
    grant = found->second;
  }
  const exec::Ticket gone = grant->gone.ticket();
  bool idle = false;
  {
    std::lock_guard lock(grant->mutex);
    idle = grant->landings == 0 && !grant->revoked;
    grant->revoked = true;
  }
  if (idle) forget(std::move(grant));
  return gone;
}

Result<Landing> GrantTable::land(GrantId id, const wire::EndpointId& from,
                                 std::span<const wire::DataEntry> entries) {
  std::shared_ptr<Grant> grant;
  {
    std::lock_guard lock(mutex_);
    const auto found = open_.find(id);
    if (found != open_.end()) grant = found->second;
  }
  if (!grant || (grant->holder && *grant->holder != from)) {
    return fail(Code::kNotFound, "no such grant is open to this endpoint");
  }
  Landing landing;
  {
    // From here on the grant is not gone before the landing ends, and its regions stay.
    std::lock_guard lock(grant->mutex);
    if (grant->revoked) return fail(Code::kNotFound, "the grant was revoked");
    ++grant->landings;
    landing.table_ = this;
    landing.grant_ = grant;
  }
  landing.targets.reserve(entries.size());
  for (const wire::DataEntry& entry : entries) {
    std::byte* address = resolve(*grant, entry);
    if (address == nullptr) {
      return fail(Code::kInvalid, fmt::format("region {} offset {} length {} is outside the grant",
                                              entry.region, entry.offset, entry.length));
    }
    landing.targets.push_back({address, entry.length});
  }
  return landing;
}

std::size_t GrantTable::size() const {
  std::lock_guard lock(mutex_);
  return open_.size();
}

}  // namespace tpusync::transport
