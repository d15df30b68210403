// Registered memory: the only memory that the transport reads for sending or writes on behalf of a peer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "tpusync/base/error.h"

namespace tpusync::transport {

using RegionId = std::uint32_t;  // never 0, never used twice by one endpoint

// Immutable. The memory is the registrant's; it lies still as long as somebody holds the region.
struct Region {
  RegionId id = 0;
  std::byte* base = nullptr;
  std::size_t length = 0;
};

using RegionRef = std::shared_ptr<const Region>;

// Thread-safe.
class RegionTable {
 public:
  // kInvalid for no memory at all or memory that overlaps a region.
  base::Result<RegionId> add(std::byte* base, std::size_t length);

  // kNotFound; kBusy while a grant or a transfer holds the region.
  base::Status remove(RegionId id);

  // Null when there is none.
  RegionRef find(RegionId id) const;
  // The region that holds all of [address, address + length); null when none does.
  RegionRef containing(const std::byte* address, std::size_t length) const;

 private:
  mutable std::mutex mutex_;
  RegionId last_id_ = 0;
  std::unordered_map<RegionId, RegionRef> by_id_;
  std::map<const std::byte*, RegionRef> by_base_;
};

}  // namespace tpusync::transport
