#include <fmt/format.h>

#include "tpusync/wire/frame.h"
#include "tpusync/wire/reader.h"

namespace tpusync::wire {

using base::Code;
using base::fail;
using base::Result;

namespace {

bool is_known(std::uint8_t type) {
  return type >= static_cast<std::uint8_t>(FrameType::kData) &&
         type <= static_cast<std::uint8_t>(FrameType::kGoodbye);
}

DataEntry read_entry(Reader& in) {
  DataEntry entry;
  entry.region = in.u32();
  entry.length = in.u32();
  entry.offset = in.u64();
  return entry;
}

// A range that is empty or wraps around is no range.
bool is_sane(const DataEntry& entry) {
  return entry.length > 0 && entry.length <= kPayloadBytesMax && entry.offset + entry.length > entry.offset;
}

struct Start {
  std::uint64_t grant = 0;
  std::uint32_t count = 0;
};

Result<Start> read_start(Reader& in, std::size_t entry_bytes) {
  Start start;
  start.grant = in.u64();
  start.count = in.u32();
  const std::uint32_t reserved = in.u32();
  if (!in.ok() || reserved != 0 || start.count == 0 || start.count > kEntriesMax ||
      in.left() != start.count * entry_bytes) {
    return fail(Code::kCorrupt,
                fmt::format("a table of {} entries with {} bytes left", start.count, in.left()));
  }
  return start;
}

}  // namespace

Result<Head> decode_head(std::span<const std::byte> bytes) {
  Reader in(bytes);
  const std::uint32_t magic = in.u32();
  const std::uint8_t type = in.u8();
  Head head;
  head.flags = in.u8();
  const std::uint16_t reserved = in.u16();
  head.table_bytes = in.u32();
  head.payload_bytes = in.u32();
  head.sequence = in.u64();
  head.generation = in.u64();
  head.transfer = in.u64();
  head.checksum = in.u64();
  if (!in.finished()) return fail(Code::kCorrupt, fmt::format("a frame head of {} bytes", bytes.size()));
  if (magic != kFrameMagic) return fail(Code::kCorrupt, fmt::format("frame magic {:#x}", magic));
  if (!is_known(type)) return fail(Code::kCorrupt, fmt::format("frame type {}", type));
  head.type = static_cast<FrameType>(type);
  if ((head.flags & ~kFlagChecksum) != 0 || reserved != 0)
    return fail(Code::kCorrupt, "a reserved bit is set");
  if (head.table_bytes > kTableBytesMax || head.payload_bytes > kPayloadBytesMax) {
    return fail(Code::kCorrupt,
                fmt::format("table {} or payload {} bytes", head.table_bytes, head.payload_bytes));
  }
  if ((head.payload_bytes > 0) != (head.type == FrameType::kData)) {
    return fail(Code::kCorrupt,
                fmt::format("frame type {} with a payload of {} bytes", type, head.payload_bytes));
  }
  return head;
}

Result<DataTable> decode_data(std::span<const std::byte> bytes) {
  Reader in(bytes);
  const Result<Start> start = read_start(in, kDataEntryBytes);
  if (!start) return tl::unexpected(start.error());
  DataTable table{start->grant, {}};
  table.entries.reserve(start->count);
  for (std::uint32_t i = 0; i < start->count; ++i) {
    table.entries.push_back(read_entry(in));
    if (!is_sane(table.entries.back())) return fail(Code::kCorrupt, fmt::format("entry {} is no range", i));
  }
  return table;
}

Result<OfferTable> decode_offer(std::span<const std::byte> bytes) {
  Reader in(bytes);
  const Result<Start> start = read_start(in, kOfferEntryBytes);
  if (!start) return tl::unexpected(start.error());
  OfferTable table{start->grant, {}};
  table.entries.reserve(start->count);
  for (std::uint32_t i = 0; i < start->count; ++i) {
    OfferEntry entry;
    entry.target = read_entry(in);
    entry.source_region = in.u32();
    const std::uint32_t reserved = in.u32();
    entry.source_offset = in.u64();
    if (!is_sane(entry.target) || reserved != 0 ||
        entry.source_offset + entry.target.length < entry.source_offset) {
      return fail(Code::kCorrupt, fmt::format("entry {} is no range", i));
    }
    table.entries.push_back(entry);
  }
  return table;
}

Result<ShareTable> decode_share(std::span<const std::byte> bytes) {
  Reader in(bytes);
  const std::uint8_t kind = in.u8();
  const std::uint8_t reserved_first = in.u8();
  const std::uint16_t reserved = in.u16();
  ShareTable table;
  table.region = in.u32();
  table.length = in.u64();
  table.address = in.u64();
  if (!in.finished() || reserved_first != 0 || reserved != 0)
    return fail(Code::kCorrupt, fmt::format("a share of {} bytes", bytes.size()));
  if (kind != kShareAddress) return fail(Code::kCorrupt, fmt::format("share kind {}", kind));
  if (table.length == 0 || table.address == 0 || table.address + table.length < table.address) {
    return fail(Code::kCorrupt, fmt::format("shared region {} is no range", table.region));
  }
  return table;
}

Result<RefuseTable> decode_refuse(std::span<const std::byte> bytes) {
  Reader in(bytes);
  RefuseTable table;
  table.sequence = in.u64();
  const std::uint8_t code = in.u8();
  if (!in.ok() || in.left() > kReasonBytesMax || code == 0 || code > static_cast<std::uint8_t>(Code::kIo)) {
    return fail(Code::kCorrupt, fmt::format("a refusal of {} bytes with code {}", bytes.size(), code));
  }
  table.code = static_cast<Code>(code);
  for (const std::byte byte : in.bytes(in.left())) {
    const char c = static_cast<char>(byte);
    table.reason.push_back(c >= ' ' && c <= '~' ? c : '?');
  }
  return table;
}

Result<std::uint64_t> decode_ack(std::span<const std::byte> bytes) {
  Reader in(bytes);
  const std::uint64_t sequence = in.u64();
  if (!in.finished())
    return fail(Code::kCorrupt, fmt::format("an acknowledgement of {} bytes", bytes.size()));
  return sequence;
}

}  // namespace tpusync::wire
