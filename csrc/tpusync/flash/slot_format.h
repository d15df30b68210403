// The bytes of a region's files, version 1. The document is docs/formats/flash-v1.md; this is its encoder and
// decoder.
//
//   region-NNN.table   [header block 4096] [record 64] [record 64] ...      record i describes slot i
//   region-NNN.slots   [slot] [slot] ...                                   payload only
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "tpusync/index/page_key.h"
#include "tpusync/index/prefix_index.h"

namespace tpusync::flash {

inline constexpr std::uint32_t kFormatVersion = 1;
inline constexpr std::size_t kHeaderBlockBytes = 4096;
inline constexpr std::size_t kRecordBytes = 64;
inline constexpr std::size_t kSlotAlignBytes = 4096;
inline constexpr std::size_t kDigestBytes = 32;

using Digest = std::array<std::byte, kDigestBytes>;  // of the identity: the namespace

constexpr std::uint64_t record_offset(std::uint64_t slot) {
  return kHeaderBlockBytes + slot * kRecordBytes;
}

struct TableHeader {
  std::uint32_t version = kFormatVersion;
  Digest name_space{};
  std::uint64_t page_bytes = 0;
  std::uint64_t slot_bytes = 0;
  std::int64_t created_unix_ns = 0;
  bool operator==(const TableHeader&) const = default;
};
inline constexpr std::size_t kHeaderBytes = 88;

// Who writes the region. Only for people to read: the lock decides.
struct WriterMark {
  std::uint32_t process_id = 0;
  std::int64_t since_unix_ns = 0;
  bool operator==(const WriterMark&) const = default;
};
inline constexpr std::size_t kWriterMarkOffset = 512;
inline constexpr std::size_t kWriterMarkBytes = 32;

struct SlotRecord {
  index::PageKey key;
  index::Ancestry ancestry;
  std::uint64_t generation = 0;  // below 2**48
  std::uint64_t payload_checksum = 0;
  std::uint32_t length_bytes = 0;
  std::uint16_t flags = 0;  // none is defined
};
inline constexpr std::uint64_t kGenerationMax = (std::uint64_t{1} << 48) - 1;

// A generation tells when its page was written: the higher of that moment and the one after the last
// generation. Steps of 10 us since 2025 last until 2114, and no disk writes more pages than that in the long
// run.
std::uint64_t generation_at(std::int64_t unix_ns);
std::int64_t generation_unix_ns(std::uint64_t generation);

std::array<std::byte, kHeaderBytes> encode_header(const TableHeader& header);
// Nothing: damaged, or no header at all.
std::optional<TableHeader> decode_header(std::span<const std::byte, kHeaderBytes> bytes);

std::array<std::byte, kWriterMarkBytes> encode_writer_mark(const WriterMark& mark);
std::optional<WriterMark> decode_writer_mark(std::span<const std::byte, kWriterMarkBytes> bytes);

// The seed that binds a record to its namespace; with the slot added it binds it to its place, too.
std::uint64_t record_seed(const Digest& name_space);

std::array<std::byte, kRecordBytes> encode_record(const SlotRecord& record, std::uint64_t seed,
                                                  index::SlotId slot);
// Nothing: the slot is free, or the record is damaged, torn, of another slot or of another namespace.
std::optional<SlotRecord> decode_record(std::span<const std::byte, kRecordBytes> bytes, std::uint64_t seed,
                                        index::SlotId slot);
// A record that says "free".
bool is_clear(std::span<const std::byte, kRecordBytes> bytes);

// The seed of the payload's checksum: the right bytes under a wrong key or of an earlier use of the slot
// fail.
std::uint64_t payload_seed(const index::PageKey& key, std::uint64_t generation);

}  // namespace tpusync::flash
