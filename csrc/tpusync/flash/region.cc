#include "tpusync/flash/region.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "tpusync/base/bytes.h"
#include "tpusync/base/log.h"

namespace tpusync::flash {

using base::Code;
using base::Result;
using base::Status;
using index::SlotId;

namespace {

constexpr std::size_t kRecoverChunkBytes = 4 * base::kMiB;
constexpr std::uint32_t kNumSlotsMax = 0xfffffff0u;
constexpr std::size_t kClearChunk = 64;

std::string path_of(const Region::Options& options, std::string_view suffix) {
  return fmt::format("{}/{}{}", options.directory, region_name(options.number), suffix);
}

std::string writer_of(const os::File& table) {
  std::array<std::byte, kWriterMarkBytes> bytes{};
  const auto num_read = os::read_bytes(table, bytes, kWriterMarkOffset);
  const auto mark = num_read && *num_read == bytes.size() ? decode_writer_mark(bytes) : std::nullopt;
  return mark ? fmt::format("process {}", mark->process_id) : "an unknown process";
}

// True when `path` still leads to the open file: its lock is worth something only then.
bool is_at(os::FileSystem& files, const os::File& file, const std::string& path) {
  const auto open = file.info();
  const auto named = files.info(path);
  return open && named && open->inode == named->inode;
}

}  // namespace

std::string region_name(int number) {
  return fmt::format("region-{:03}", number);
}

Region::Region(const Options& options, std::unique_ptr<os::File> table, std::unique_ptr<os::File> slots)
    : options_(options),
      slot_bytes_(base::round_up(options.page_bytes, kSlotAlignBytes)),
      seed_(record_seed(options.name_space)),
      table_(std::move(table)),
      slots_(std::move(slots)) {}

Result<std::unique_ptr<Region>> Region::open(os::FileSystem& files, const Options& options) {
  const std::string table_path = path_of(options, kTableSuffix);
  auto table = files.open(table_path, {.create = true});
  if (!table) return tl::unexpected(std::move(table).error());
  const auto locked = (*table)->try_lock();
  if (!locked) return tl::unexpected(locked.error());
  if (!*locked) {
    return base::fail(Code::kBusy, fmt::format("{} is locked by {}", table_path, writer_of(**table)));
  }
  if (!is_at(files, **table, table_path)) {
    return base::fail(Code::kBusy, fmt::format("{} was removed while it was opened", table_path));
  }
  auto slots = files.open(path_of(options, kSlotsSuffix), {.create = true, .direct = options.direct});
  if (!slots) return tl::unexpected(std::move(slots).error());
  std::unique_ptr<Region> region(new Region(options, std::move(*table), std::move(*slots)));
  TPUSYNC_TRY(region->check_header());
  const auto info = region->slots_->info();
  if (!info) return tl::unexpected(info.error());
  region->num_slots_ = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(info->size_bytes / region->slot_bytes_, kNumSlotsMax));
  return region;
}

Status Region::check_header() {
  std::array<std::byte, kHeaderBytes> bytes{};
  const auto num_read = os::read_bytes(*table_, bytes, 0);
  if (!num_read) return tl::unexpected(num_read.error());
  const auto header = *num_read == bytes.size() ? decode_header(bytes) : std::nullopt;
  const std::string path = path_of(options_, kTableSuffix);
  if (header && header->version > kFormatVersion) {
    return base::fail(Code::kUnsupported, fmt::format("{} has format version {}, this program knows {}", path,
                                                      header->version, kFormatVersion));
  }
  if (header && header->name_space != options_.name_space) {
    return base::fail(Code::kInvalid, fmt::format("{} belongs to another namespace", path));
  }
  if (header && header->page_bytes != options_.page_bytes) {
    return base::fail(Code::kInvalid, fmt::format("{} holds pages of {} bytes, asked for are {}", path,
                                                  header->page_bytes, options_.page_bytes));
  }
  if (!header) {
    // Nothing in it is needed to read the records, which prove themselves: write it anew.
    header_damaged_ = *num_read > 0;
    TPUSYNC_TRY(os::write_bytes(*table_,
                                encode_header({.name_space = options_.name_space,
                                               .page_bytes = options_.page_bytes,
                                               .slot_bytes = slot_bytes_,
                                               .created_unix_ns = options_.now_unix_ns}),
                                0));
  }
  const WriterMark mark{.process_id = options_.process_id, .since_unix_ns = options_.now_unix_ns};
  return os::write_bytes(*table_, encode_writer_mark(mark), kWriterMarkOffset);
}

Result<std::uint64_t> Region::recover(const std::function<void(SlotId, const SlotRecord&)>& found) {
  std::uint64_t num_damaged = header_damaged_ ? 1 : 0;
  std::vector<std::byte> chunk(
      std::min<std::uint64_t>(kRecoverChunkBytes, std::uint64_t{num_slots_} * kRecordBytes));
  for (std::uint64_t slot = 0; slot < num_slots_;) {
    const auto num_read = os::read_bytes(*table_, chunk, record_offset(slot));
    if (!num_read) return tl::unexpected(num_read.error());
    const std::uint64_t num_records = std::min<std::uint64_t>(*num_read / kRecordBytes, num_slots_ - slot);
    if (num_records == 0) break;
    for (std::uint64_t i = 0; i < num_records; ++i, ++slot) {
      const auto bytes = std::span(chunk).subspan(i * kRecordBytes).first<kRecordBytes>();
      if (is_clear(bytes)) continue;
      const SlotId id{static_cast<std::uint32_t>(slot)};
      const auto record = decode_record(bytes, seed_, id);
      if (record && record->length_bytes == options_.page_bytes) {
        found(id, *record);
      } else {
        ++num_damaged;
      }
    }
  }
  return num_damaged;
}

Status Region::write_records(SlotId first, std::span<const SlotRecord> records) {
  std::vector<std::byte> bytes(records.size() * kRecordBytes);
  for (std::size_t i = 0; i < records.size(); ++i) {
    const SlotId slot{index::to_number(first) + static_cast<std::uint32_t>(i)};
    std::ranges::copy(encode_record(records[i], seed_, slot), bytes.begin() + i * kRecordBytes);
  }
  return os::write_bytes(*table_, bytes, record_offset(index::to_number(first)));
}

Status Region::clear_records(SlotId first, std::uint32_t num_records) {
  static constexpr std::array<std::byte, kClearChunk * kRecordBytes> kClear{};
  for (std::uint64_t done = 0; done < num_records; done += kClearChunk) {
    const std::size_t num_now = std::min<std::uint64_t>(kClearChunk, num_records - done);
    TPUSYNC_TRY(os::write_bytes(*table_, std::span(kClear).first(num_now * kRecordBytes),
                                record_offset(index::to_number(first) + done)));
  }
  return {};
}

Status Region::resize(std::uint32_t num_slots) {
  if (num_slots > num_slots_) {
    // What lies in the table behind the old end describes slots that were given back: cut it off first.
    TPUSYNC_TRY(table_->truncate(record_offset(num_slots_)));
    Status grown = table_->allocate(record_offset(num_slots));
    if (grown) grown = slots_->allocate(num_slots * slot_bytes_);
    if (!grown) {
      // A disk that filled up half way leaves the files as they were; an error here changes nothing any more.
      (void)slots_->truncate(num_slots_ * slot_bytes_);
      (void)table_->truncate(record_offset(num_slots_));
      return grown;
    }
  } else {
    TPUSYNC_TRY(table_->truncate(record_offset(num_slots)));
    TPUSYNC_TRY(slots_->truncate(num_slots * slot_bytes_));
  }
  num_slots_ = num_slots;
  return {};
}

Status Region::sync_slots() {
  return slots_->sync();
}
Status Region::sync_table() {
  return table_->sync();
}

std::uint64_t Region::disk_bytes_of(std::uint64_t num_slots) const {
  const std::uint64_t table_bytes =
      base::round_up(num_slots * kRecordBytes, kSlotAlignBytes) + kHeaderBlockBytes;
  return num_slots * slot_bytes_ + table_bytes;
}

}  // namespace tpusync::flash
