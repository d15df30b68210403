#include "tpusync/tier/peers.h"

#include <algorithm>

namespace tpusync::tier {

Peers::Peers(Options options, const base::Clock& clock)
    : options_(std::move(options)), clock_(clock), regions_(std::make_shared<std::vector<Region>>()) {}

std::shared_ptr<const std::vector<Peers::Region>> Peers::regions() {
  std::unique_lock lock(mutex_, std::try_to_lock);
  // Somebody else is looking: what was known before will do.
  if (!lock) return std::atomic_load(&regions_);
  const auto now = clock_.now();
  if (!refreshed_ || now - *refreshed_ >= options_.refresh_period) {
    refreshed_ = now;
    refresh_locked();
  }
  return std::atomic_load(&regions_);
}

void Peers::refresh_locked() {
  std::vector<Region> next;
  for (const host::Registry::Entry& entry : options_.registry.entries_of(options_.name_space)) {
    if (entry.path == options_.own_path) continue;
    const auto known = std::find_if(regions_->begin(), regions_->end(), [&](const Region& region) {
      return region->file().file().path() == entry.path && region->current();
    });
    if (known != regions_->end()) {
      next.push_back(*known);
      continue;
    }
    auto region = host::PeerRegion::open(entry.path, options_.name_space);
    // Half made, damaged, or of pages that are cut otherwise: not for us.
    if (region && (*region)->file().geometry().piece_bytes == options_.geometry.piece_bytes) {
      next.push_back(std::move(*region));
    }
  }
  std::atomic_store(&regions_, std::shared_ptr<const std::vector<Region>>(
                                   std::make_shared<std::vector<Region>>(std::move(next))));
}

std::optional<Peers::Found> Peers::find(const std::vector<Region>& regions, const index::PageKey& key) {
  for (const Region& region : regions) {
    if (const auto page = region->find(key)) return Found{region, *page};
  }
  return std::nullopt;
}

}  // namespace tpusync::tier
