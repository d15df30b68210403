// Another process's region, read beside its writer: nothing here waits for it, and it never notices.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "tpusync/base/error.h"
#include "tpusync/host/region_file.h"

namespace tpusync::host {

// A resource. Thread-safe.
class PeerRegion {
 public:
  // Errors as RegionFile::read.
  static base::Result<std::unique_ptr<PeerRegion>> open(const std::string& path, const Digest& name_space);

  PeerRegion(const PeerRegion&) = delete;
  PeerRegion& operator=(const PeerRegion&) = delete;

  struct Found {
    index::SlotId slot = index::kNoSlot;
    Seal seal;
  };
  std::optional<Found> find(const index::PageKey& key) const;

  // Copies what was found into `to`, in the pieces of the geometry, and verifies that it is that page still
  // and that each byte is right. kNotFound: overtaken by the writer; kCorrupt: damaged.
  base::Status copy(const Found& found, const index::PageKey& key, std::span<std::byte* const> to) const;

  // Whether its name is still this file's and it has not grown: otherwise open it anew.
  bool current() const;
  // The bytes up to which SealTable and payload are shared.
  const RegionFile& file() const { return *file_; }

 private:
  explicit PeerRegion(std::unique_ptr<RegionFile> file);

  const std::unique_ptr<RegionFile> file_;
  const SealTable seals_;
  const KeyTable keys_;
};

}  // namespace tpusync::host
