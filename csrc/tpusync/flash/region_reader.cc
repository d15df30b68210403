#include "tpusync/flash/region_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "tpusync/base/bytes.h"
#include "tpusync/flash/region.h"

namespace tpusync::flash {

using base::Code;
using base::Result;
using base::Status;
using index::SlotId;

namespace {

constexpr std::size_t kScanChunkBytes = 256 * base::kKiB;
constexpr std::uint64_t kNumSlotsMax = 0xfffffff0u;

Status check_header(const TableHeader& header, const std::string& base_path) {
  if (header.version > kFormatVersion) {
    return base::fail(Code::kUnsupported,
                      fmt::format("{}{} has format version {}, this program knows {}", base_path,
                                  kTableSuffix, header.version, kFormatVersion));
  }
  const bool possible = header.page_bytes >= 1 && header.page_bytes <= 0xffffffffu &&
                        header.slot_bytes == base::round_up(header.page_bytes, kSlotAlignBytes);
  if (possible) return {};
  return base::fail(Code::kCorrupt, fmt::format("{}{}: pages of {} bytes in slots of {} bytes", base_path,
                                                kTableSuffix, header.page_bytes, header.slot_bytes));
}

bool is_at(os::FileSystem& files, const os::File& file, const std::string& path) {
  const auto open = file.info();
  const auto named = files.info(path);
  return open && named && open->inode == named->inode;
}

}  // namespace

Result<TableHead> read_table_head(const os::File& table) {
  std::array<std::byte, kWriterMarkOffset + kWriterMarkBytes> bytes{};
  const auto num_read = os::read_bytes(table, bytes, 0);
  if (!num_read) return tl::unexpected(num_read.error());
  const std::span all(bytes);
  // What was not read is zero and does not hold.
  return TableHead{.header = decode_header(all.first<kHeaderBytes>()),
                   .writer = decode_writer_mark(all.subspan<kWriterMarkOffset, kWriterMarkBytes>())};
}

RegionReader::RegionReader(os::FileSystem& files, const Options& options, std::unique_ptr<os::File> table,
                           std::unique_ptr<os::File> slots)
    : files_(files), options_(options), table_(std::move(table)), slots_(std::move(slots)) {}

Result<std::unique_ptr<RegionReader>> RegionReader::open(os::FileSystem& files, const Options& options) {
  auto table = files.open(options.base_path + std::string(kTableSuffix), {.write = false});
  if (!table) return tl::unexpected(std::move(table).error());
  auto slots =
      files.open(options.base_path + std::string(kSlotsSuffix), {.write = false, .direct = options.direct});
  if (!slots) return tl::unexpected(std::move(slots).error());
  std::unique_ptr<RegionReader> reader(
      new RegionReader(files, options, std::move(*table), std::move(*slots)));
  TPUSYNC_TRY(reader->find_header());
  return reader;
}

Status RegionReader::find_header() {
  const auto head = read_table_head(*table_);
  if (!head) return tl::unexpected(head.error());
  if (!head->header) return guess_header();
  header_ = *head->header;
  seed_ = record_seed(header_.name_space);
  TPUSYNC_TRY(check_header(header_, options_.base_path));
  if (!options_.name_space || *options_.name_space == header_.name_space) return {};
  return base::fail(Code::kInvalid,
                    fmt::format("{}{} belongs to another namespace", options_.base_path, kTableSuffix));
}

// Records prove themselves by the namespace alone, and each of them says how long pages are.
Status RegionReader::guess_header() {
  header_damaged_ = true;
  const std::string path = options_.base_path + std::string(kTableSuffix);
  if (!options_.name_space) return base::fail(Code::kCorrupt, fmt::format("{}: no header holds", path));
  header_ = {.name_space = *options_.name_space};
  seed_ = record_seed(header_.name_space);
  const auto num = num_records();
  if (!num) return tl::unexpected(num.error());
  const auto scanned = scan(SlotId{0}, *num, [this](SlotId, const Seen& seen) {
    if (seen.kind == Kind::kHolds && header_.page_bytes == 0) header_.page_bytes = seen.record.length_bytes;
  });
  if (!scanned) return tl::unexpected(scanned.error());
  if (header_.page_bytes == 0) {
    return base::fail(Code::kCorrupt, fmt::format("{}: neither a header nor a record holds", path));
  }
  header_.slot_bytes = base::round_up(header_.page_bytes, kSlotAlignBytes);
  return {};
}

Result<std::uint32_t> RegionReader::count(const os::File& file, std::uint64_t begin,
                                          std::uint64_t step) const {
  const auto info = file.info();
  if (!info) return tl::unexpected(info.error());
  const std::uint64_t bytes = info->size_bytes - std::min(info->size_bytes, begin);
  return static_cast<std::uint32_t>(std::min(bytes / step, kNumSlotsMax));
}

Result<std::uint32_t> RegionReader::num_slots() const {
  return count(*slots_, 0, header_.slot_bytes);
}
Result<std::uint32_t> RegionReader::num_records() const {
  return count(*table_, kHeaderBlockBytes, kRecordBytes);
}

RegionReader::Seen RegionReader::decode(SlotId slot, std::span<const std::byte, kRecordBytes> bytes) const {
  Seen seen;
  if (is_clear(bytes)) return seen;
  std::copy(bytes.begin(), bytes.end(), seen.bytes.begin());
  const auto record = decode_record(bytes, seed_, slot);
  // A page size of 0: not known yet.
  const bool holds = record && (header_.page_bytes == 0 ? record->length_bytes > 0
                                                        : record->length_bytes == header_.page_bytes);
  seen.kind = holds ? Kind::kHolds : Kind::kDamaged;
  if (holds) seen.record = *record;
  return seen;
}

Result<std::uint32_t> RegionReader::scan(SlotId first, std::uint32_t num,
                                         const std::function<void(SlotId, const Seen&)>& visit) const {
  std::vector<std::byte> chunk(std::min<std::uint64_t>(kScanChunkBytes, std::uint64_t{num} * kRecordBytes));
  std::uint32_t done = 0;
  while (done < num) {
    const std::uint32_t begin = index::to_number(first) + done;
    const auto wanted = std::span(chunk).first(
        std::min<std::uint64_t>(chunk.size(), std::uint64_t{num - done} * kRecordBytes));
    const auto num_read = os::read_bytes(*table_, wanted, record_offset(begin));
    if (!num_read) return tl::unexpected(num_read.error());
    const auto num_here = static_cast<std::uint32_t>(*num_read / kRecordBytes);
    for (std::uint32_t i = 0; i < num_here; ++i) {
      const SlotId slot{begin + i};
      const Seen seen = decode(slot, wanted.subspan(i * kRecordBytes).first<kRecordBytes>());
      if (seen.kind != Kind::kFree) visit(slot, seen);
    }
    done += num_here;
    if (*num_read < wanted.size()) break;
  }
  return done;
}

Result<RegionReader::Seen> RegionReader::look(SlotId slot) const {
  RecordBytes bytes{};
  const auto num_read = os::read_bytes(*table_, bytes, record_offset(index::to_number(slot)));
  if (!num_read) return tl::unexpected(num_read.error());
  if (*num_read < bytes.size()) return Seen{};
  return decode(slot, bytes);
}

// A writer clears a record before it changes the payload, and writes one after that: a record that is the
// same before and after the read described these bytes all the while.
Status RegionReader::read(SlotId slot, const index::PageKey& key, PageBuffer& buffer) const {
  const auto before = look(slot);
  if (!before) return tl::unexpected(before.error());
  const auto miss = [&] {
    return base::fail(Code::kNotFound, fmt::format("{}: slot {} does not hold the page", options_.base_path,
                                                   index::to_number(slot)));
  };
  if (before->kind != Kind::kHolds || before->record.key != key) return miss();
  std::size_t num_wanted = 0;
  for (const iovec& piece : buffer.pieces()) num_wanted += piece.iov_len;
  const auto num_read = slots_->read(buffer.pieces(), index::to_number(slot) * header_.slot_bytes);
  const auto after = look(slot);
  if (!after) return tl::unexpected(after.error());
  if (after->bytes != before->bytes) return miss();
  if (!num_read) return tl::unexpected(num_read.error());
  const std::uint64_t seed = payload_seed(key, before->record.generation);
  if (*num_read == num_wanted && buffer.checksum(seed) == before->record.payload_checksum) {
    buffer.scatter();
    return {};
  }
  return base::fail(Code::kCorrupt, *num_read == num_wanted
                                        ? fmt::format("{}: slot {} does not hold what was written to it",
                                                      options_.base_path, index::to_number(slot))
                                        : fmt::format("{}: slot {} lies behind the end of the slot file",
                                                      options_.base_path, index::to_number(slot)));
}

bool RegionReader::is_current() const {
  return is_at(files_, *table_, options_.base_path + std::string(kTableSuffix)) &&
         is_at(files_, *slots_, options_.base_path + std::string(kSlotsSuffix));
}

}  // namespace tpusync::flash
