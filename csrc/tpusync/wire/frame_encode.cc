#include <algorithm>

#include "tpusync/wire/frame.h"

namespace tpusync::wire {

void encode_head(const Head& head, Writer& out) {
  out.u32(kFrameMagic);
  out.u8(static_cast<std::uint8_t>(head.type));
  out.u8(head.flags);
  out.u16(0);
  out.u32(head.table_bytes);
  out.u32(head.payload_bytes);
  out.u64(head.sequence);
  out.u64(head.generation);
  out.u64(head.transfer);
  out.u64(head.checksum);
}

namespace {

void encode_entry(const DataEntry& entry, Writer& out) {
  out.u32(entry.region);
  out.u32(entry.length);
  out.u64(entry.offset);
}

void encode_start(std::uint64_t grant, std::size_t count, Writer& out) {
  out.u64(grant);
  out.u32(static_cast<std::uint32_t>(count));
  out.u32(0);
}

}  // namespace

void encode_table(const DataTable& table, Writer& out) {
  encode_start(table.grant, table.entries.size(), out);
  for (const DataEntry& entry : table.entries) encode_entry(entry, out);
}

void encode_table(const OfferTable& table, Writer& out) {
  encode_start(table.grant, table.entries.size(), out);
  for (const OfferEntry& entry : table.entries) {
    encode_entry(entry.target, out);
    out.u32(entry.source_region);
    out.u32(0);
    out.u64(entry.source_offset);
  }
}

void encode_table(const ShareTable& table, Writer& out) {
  out.u8(kShareAddress);
  out.u8(0);
  out.u16(0);
  out.u32(table.region);
  out.u64(table.length);
  out.u64(table.address);
}

void encode_table(const RefuseTable& table, Writer& out) {
  out.u64(table.sequence);
  out.u8(static_cast<std::uint8_t>(table.code));
  const std::size_t length = std::min(table.reason.size(), kReasonBytesMax);
  out.bytes(std::as_bytes(std::span(table.reason.data(), length)));
}

void encode_ack(std::uint64_t sequence, Writer& out) {
  out.u64(sequence);
}

}  // namespace tpusync::wire
