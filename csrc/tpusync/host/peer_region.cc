#include "tpusync/host/peer_region.h"

#include "tpusync/host/checked_copy.h"

namespace tpusync::host {

using base::Code;
using base::Result;
using base::Status;
using index::kNoSlot;
using index::PageKey;
using index::SlotId;

PeerRegion::PeerRegion(std::unique_ptr<RegionFile> file)
    : file_(std::move(file)), seals_(file_->seals()), keys_(file_->keys()) {}

Result<std::unique_ptr<PeerRegion>> PeerRegion::open(const std::string& path, const Digest& name_space) {
  Result<std::unique_ptr<RegionFile>> file = RegionFile::read(path, name_space);
  if (!file) return tl::unexpected(file.error());
  return std::unique_ptr<PeerRegion>(new PeerRegion(std::move(*file)));
}

std::optional<PeerRegion::Found> PeerRegion::find(const PageKey& key) const {
  std::optional<Seal> seal;
  const SlotId slot = keys_.find(key.short_hash(), [&](SlotId candidate) {
    seal = seals_.read(candidate);
    return seal && seal->key == key && seal->length_bytes == file_->geometry().page_bytes();
  });
  if (slot == kNoSlot) return std::nullopt;
  return Found{slot, *seal};
}

Status PeerRegion::copy(const Found& found, const PageKey& key, std::span<std::byte* const> to) const {
  CheckedCopy copy(payload_seed(seals_.seed(), key));
  for (std::size_t i = 0; i < file_->num_pieces(); ++i) copy.copy(to[i], file_->piece(found.slot, i));
  if (!seals_.holds(found.slot, found.seal.generation)) {
    return base::fail(Code::kNotFound, "its slot was allocated while it was read");
  }
  if (copy.value() != found.seal.payload_checksum) {
    return base::fail(Code::kCorrupt, "its bytes are not what was sealed");
  }
  return {};
}

bool PeerRegion::current() const {
  const std::optional<WriterState> state = file_->current_state();
  return file_->file().named() && (!state || state->num_slots <= file_->geometry().num_slots);
}

}  // namespace tpusync::host
