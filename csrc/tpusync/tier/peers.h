// The regions of the other processes of this node, of one namespace: found by name, read, never waited for.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tpusync/base/clock.h"
#include "tpusync/host/peer_region.h"
#include "tpusync/host/registry.h"

namespace tpusync::tier {

// A resource. Thread-safe.
class Peers {
 public:
  struct Options {
    host::Registry registry;
    host::Digest name_space{};
    std::string own_path;  // of the region that is not a peer
    host::Geometry geometry;
    std::chrono::milliseconds refresh_period{200};
  };
  // `clock` outlives this.
  Peers(Options options, const base::Clock& clock);

  using Region = std::shared_ptr<const host::PeerRegion>;

  // The peers of this moment; looks at the directory at most once per period.
  std::shared_ptr<const std::vector<Region>> regions();

  struct Found {
    Region region;
    host::PeerRegion::Found page;
  };
  static std::optional<Found> find(const std::vector<Region>& regions, const index::PageKey& key);

 private:
  void refresh_locked();

  const Options options_;
  const base::Clock& clock_;
  std::mutex mutex_;
  std::optional<std::chrono::steady_clock::time_point> refreshed_;
  std::shared_ptr<const std::vector<Region>> regions_;
};

}  // namespace tpusync::tier
