#include "tpusync/host/region_view.h"

#include "tpusync/host/checked_copy.h"

namespace tpusync::host {

using base::Result;
using index::SlotId;

namespace {

// A record that is not whole twice in a row, and did not change in between: its writer writes word 0 last.
bool is_damaged(const SealTable& seals, SlotId slot) {
  const std::uint64_t generation = seals.last_generation(slot);
  return seals.marked(slot) && !seals.read(slot) && seals.marked(slot) &&
         seals.last_generation(slot) == generation;
}

}  // namespace

std::vector<RegionView> view_regions(const Registry& registry) {
  std::vector<RegionView> views;
  for (const Registry::Entry& entry : registry.entries()) {
    RegionView view;
    view.entry = entry;
    view.has_writer = registry.has_writer(entry.path);
    const Result<std::unique_ptr<RegionFile>> file = RegionFile::read(entry.path, entry.name_space);
    if (!file) {
      view.trouble = file.error().message;
      views.push_back(std::move(view));
      continue;
    }
    view.writer = (*file)->current_state();
    view.page_bytes = (*file)->geometry().page_bytes();
    view.num_slots = (*file)->geometry().num_slots;
    const SealTable seals = (*file)->seals();
    for (std::uint64_t i = 0; i < view.num_slots; ++i) {
      const SlotId slot{static_cast<std::uint32_t>(i)};
      if (seals.read(slot)) {
        ++view.num_pages;
      } else if (is_damaged(seals, slot)) {
        ++view.num_damaged;
      }
    }
    views.push_back(std::move(view));
  }
  return views;
}

Result<std::vector<index::PageKey>> keys_in(const Registry::Entry& entry) {
  const Result<std::unique_ptr<RegionFile>> file = RegionFile::read(entry.path, entry.name_space);
  if (!file) return tl::unexpected(file.error());
  const SealTable seals = (*file)->seals();
  std::vector<index::PageKey> keys;
  for (std::uint64_t i = 0; i < (*file)->geometry().num_slots; ++i) {
    if (const auto seal = seals.read(SlotId{static_cast<std::uint32_t>(i)})) keys.push_back(seal->key);
  }
  return keys;
}

RegionCheck::RegionCheck(std::unique_ptr<RegionFile> file) : file_(std::move(file)), seals_(file_->seals()) {
  progress_.num_slots = file_->geometry().num_slots;
}

Result<std::unique_ptr<RegionCheck>> RegionCheck::open(const Registry::Entry& entry) {
  Result<std::unique_ptr<RegionFile>> file = RegionFile::read(entry.path, entry.name_space);
  if (!file) return tl::unexpected(file.error());
  return std::unique_ptr<RegionCheck>(new RegionCheck(std::move(*file)));
}

bool RegionCheck::step(std::uint64_t num_bytes) {
  const std::uint64_t end_bytes = progress_.num_bytes + num_bytes;
  while (progress_.num_looked_at < progress_.num_slots && progress_.num_bytes < end_bytes) {
    look_at(SlotId{static_cast<std::uint32_t>(progress_.num_looked_at++)});
  }
  return progress_.num_looked_at < progress_.num_slots;
}

void RegionCheck::look_at(SlotId slot) {
  const std::optional<Seal> seal = seals_.read(slot);
  if (!seal) {
    if (is_damaged(seals_, slot)) findings_.push_back({.is_record = true, .slot = slot});
    return;
  }
  CheckedCopy sum(payload_seed(seals_.seed(), seal->key));
  for (std::size_t i = 0; i < file_->num_pieces(); ++i) sum.look(file_->piece(slot, i));
  progress_.num_bytes += file_->geometry().page_bytes();
  if (!seals_.holds(slot, seal->generation)) {
    ++progress_.num_moved;
  } else if (sum.value() != seal->payload_checksum) {
    findings_.push_back({.is_record = false, .slot = slot});
  } else {
    ++progress_.num_intact;
  }
}

}  // namespace tpusync::host
