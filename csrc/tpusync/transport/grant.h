// Grants: what makes a range of registered memory writable by a peer, for one request. The number of a grant
// is drawn at random and told to the peer by the layer above; a frame that names another one, or bytes
// outside its ranges, is refused and nothing is written.
//
//   open --revoke--> revoked --last landing ends--> gone (the ticket of revoke is done)
//
// All bytes of this process are written by this process (from a socket, or fetched from a peer's memory), so
// the ticket of a revocation needs nobody else's word: once it is done, no byte can land under that grant any
// more.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/exec/ticket.h"
#include "tpusync/transport/region.h"
#include "tpusync/wire/frame.h"
#include "tpusync/wire/handshake.h"

namespace tpusync::transport {

using GrantId = std::uint64_t;

struct Range {
  RegionId region = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
};

struct Grant;
class GrantTable;

// A frame whose bytes are being written: the grant is not gone as long as it lives. Movable; confined to its
// thread.
class Landing {
 public:
  Landing() = default;
  Landing(Landing&&) noexcept = default;
  Landing& operator=(Landing&& other) noexcept;
  ~Landing() { end(); }

  bool active() const { return grant_ != nullptr; }
  // No further byte may be written; end the landing.
  bool revoked() const;
  void end();

  std::vector<iovec> targets;  // where the bytes of the entries go, in order

 private:
  friend class GrantTable;
  GrantTable* table_ = nullptr;
  std::shared_ptr<Grant> grant_;
};

// Thread-safe.
class GrantTable {
 public:
  GrantTable(const RegionTable& regions, std::size_t num_grants_max)
      : regions_(regions), num_grants_max_(num_grants_max) {}

  // Opens a grant; with `holder` only that endpoint may use it. kInvalid for a range that is not inside a
  // region or overlaps another one of this grant; kBusy at the limit.
  base::Result<GrantId> open(std::vector<Range> ranges, std::optional<wire::EndpointId> holder);

  // Done when no byte can land any more; at once for a number that is not open. The caller then makes every
  // thread that lands look at Landing::revoked(), so that a stalled one does not hold the ticket.
  exec::Ticket revoke(GrantId id);

  // kNotFound: no such grant (of this holder); kInvalid: an entry is not inside its ranges.
  base::Result<Landing> land(GrantId id, const wire::EndpointId& from,
                             std::span<const wire::DataEntry> entries);

  std::size_t size() const;

 private:
  friend class Landing;
  // Drops a grant that is revoked and has no landing, then finishes its ticket: by then its regions are free.
  void forget(std::shared_ptr<Grant> grant);

  const RegionTable& regions_;
  const std::size_t num_grants_max_;
  mutable std::mutex mutex_;
  std::unordered_map<GrantId, std::shared_ptr<Grant>> open_;  // and those revoked but not gone
};

}  // namespace tpusync::transport
