#include "tpusync/flash/region_check.h"

#include <fmt/format.h>

#include <thread>

namespace tpusync::flash {

using base::Code;
using base::Result;
using base::Status;
using index::SlotId;
using Kind = RegionReader::Kind;

namespace {

constexpr std::uint32_t kStretch = 4096;  // records
// A writer that was interrupted in the middle of a record has gone on by then.
constexpr int kNumLooks = 3;
constexpr std::chrono::milliseconds kBetweenLooks{10};

}  // namespace

RegionCheck::RegionCheck(std::unique_ptr<RegionReader> reader)
    : reader_(std::move(reader)),
      buffers_(reader_->header().slot_bytes),
      memory_(reader_->header().slot_bytes) {}

Result<std::unique_ptr<RegionCheck>> RegionCheck::open(os::FileSystem& files,
                                                       const RegionReader::Options& options) {
  auto reader = RegionReader::open(files, options);
  if (!reader) return tl::unexpected(std::move(reader).error());
  std::unique_ptr<RegionCheck> check(new RegionCheck(std::move(*reader)));
  const auto num_records = check->reader_->num_records();
  if (!num_records) return tl::unexpected(num_records.error());
  check->progress_.num_slots = *num_records;
  return check;
}

Result<bool> RegionCheck::step(std::uint64_t num_bytes) {
  for (const std::uint64_t until = progress_.num_bytes + num_bytes; progress_.num_bytes < until;) {
    if (next_ == entries_.size()) {
      const auto loaded = load_entries();
      if (!loaded) return tl::unexpected(loaded.error());
      if (!*loaded) {
        TPUSYNC_TRY(confirm());
        TPUSYNC_TRY(check_sizes());
        return false;
      }
      continue;
    }
    TPUSYNC_TRY(check_entry(entries_[next_++]));
  }
  return true;
}

// The next stretch of the table; false at its end.
Result<bool> RegionCheck::load_entries() {
  entries_.clear();
  next_ = 0;
  if (!reader_->is_current()) return false;  // removed: there is nothing left to check, and no space to keep
  const auto scanned = reader_->scan(
      SlotId{progress_.num_looked_at}, kStretch,
      [this](SlotId slot, const RegionReader::Seen& seen) { entries_.push_back({slot, seen}); });
  if (!scanned) return tl::unexpected(scanned.error());
  progress_.num_looked_at += *scanned;
  progress_.num_slots = std::max(progress_.num_slots, progress_.num_looked_at);
  return *scanned > 0;
}

Status RegionCheck::check_entry(const Entry& entry) {
  if (entry.seen.kind == Kind::kHolds) return check_page(entry, false);
  suspects_.push_back(entry);
  return {};
}

Status RegionCheck::check_page(const Entry& entry, bool is_last_look) {
  const std::uint64_t address = reinterpret_cast<std::uint64_t>(memory_.bytes().data());
  const std::uint64_t length = reader_->header().page_bytes;
  PageBuffer buffer({&address, 1}, {&length, 1}, reader_->slots(), buffers_);
  const Status status = reader_->read(entry.slot, entry.seen.record.key, buffer);
  progress_.num_bytes += length;
  if (status) {
    ++progress_.num_intact;
  } else if (status.error().code == Code::kNotFound) {
    ++progress_.num_moved;
  } else if (!is_last_look) {
    suspects_.push_back(entry);
  } else {
    add(status.error().code == Code::kCorrupt ? Finding::Kind::kPayload : Finding::Kind::kUnreadable, entry,
        status.error().message);
  }
  return {};
}

// Looks at what seemed damaged again: it is, if its record never changed.
Status RegionCheck::confirm() {
  for (int look = 0; look < kNumLooks && !suspects_.empty(); ++look) {
    std::this_thread::sleep_for(kBetweenLooks);
    std::vector<Entry> suspects;
    for (const Entry& entry : std::exchange(suspects_, {})) {
      const auto now = reader_->look(entry.slot);
      if (!now) return tl::unexpected(now.error());
      if (now->bytes == entry.seen.bytes) {
        suspects.push_back(entry);
      } else {
        ++progress_.num_moved;
      }
    }
    suspects_ = std::move(suspects);
  }
  for (const Entry& entry : std::exchange(suspects_, {})) {
    if (entry.seen.kind == Kind::kHolds) {
      TPUSYNC_TRY(check_page(entry, true));
    } else {
      add(Finding::Kind::kRecord, entry,
          fmt::format("slot {}: its record in the table does not hold", index::to_number(entry.slot)));
    }
  }
  return {};
}

// A region that shrinks cuts its table first, which is the shorter one for that moment only.
Status RegionCheck::check_sizes() {
  if (reader_->header_damaged()) {
    findings_.push_back({.kind = Finding::Kind::kHeader, .text = "the header of the table does not hold"});
  }
  std::uint32_t num_slots = 0, num_records = 0;
  for (int look = 0; look < kNumLooks; ++look) {
    if (look > 0) std::this_thread::sleep_for(kBetweenLooks);
    const auto slots = reader_->num_slots();
    const auto records = reader_->num_records();
    if (!slots) return tl::unexpected(slots.error());
    if (!records) return tl::unexpected(records.error());
    if (*slots <= *records || !reader_->is_current()) return {};
    num_slots = *slots;
    num_records = *records;
  }
  findings_.push_back({.kind = Finding::Kind::kShortTable,
                       .slot = num_records,
                       .text = fmt::format("the table has {} records for {} slots", num_records, num_slots)});
  return {};
}

void RegionCheck::add(Finding::Kind kind, const Entry& entry, std::string text) {
  findings_.push_back({.kind = kind,
                       .slot = index::to_number(entry.slot),
                       .record = entry.seen.bytes,
                       .text = std::move(text)});
}

}  // namespace tpusync::flash
