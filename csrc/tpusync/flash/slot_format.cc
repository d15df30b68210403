#include "tpusync/flash/slot_format.h"

#include <algorithm>
#include <string_view>

#include "tpusync/base/bytes.h"
#include "tpusync/base/checksum.h"

namespace tpusync::flash {

using base::load_le;
using base::store_le;

namespace {

constexpr std::string_view kTableMagic = "TPUSYNCT";
constexpr std::string_view kWriterMagic = "TPUSYNCW";

template <std::size_t kSize>
void put_text(std::array<std::byte, kSize>& bytes, std::size_t offset, std::string_view text) {
  std::memcpy(bytes.data() + offset, text.data(), text.size());
}

bool has_text(std::span<const std::byte> bytes, std::string_view text) {
  return std::memcmp(bytes.data(), text.data(), text.size()) == 0;
}

// The last 8 bytes are the checksum of those before.
template <std::size_t kSize>
void seal(std::array<std::byte, kSize>& bytes) {
  store_le(bytes.data() + kSize - 8, base::checksum64(std::span(bytes).template first<kSize - 8>()));
}
bool is_sealed(std::span<const std::byte> bytes) {
  return load_le<std::uint64_t>(bytes.data() + bytes.size() - 8) ==
         base::checksum64(bytes.first(bytes.size() - 8));
}

// Two numbers in one word: 48 bits below, 16 above.
std::uint64_t pack(std::uint64_t low, std::uint16_t high) {
  return (low & kGenerationMax) | (std::uint64_t{high} << 48);
}

std::uint32_t record_checksum(std::span<const std::byte, kRecordBytes> bytes, std::uint64_t seed,
                              index::SlotId slot) {
  return static_cast<std::uint32_t>(base::checksum64(bytes.subspan(4), seed + index::to_number(slot)));
}

}  // namespace

std::array<std::byte, kHeaderBytes> encode_header(const TableHeader& header) {
  std::array<std::byte, kHeaderBytes> bytes{};
  put_text(bytes, 0, kTableMagic);
  store_le(bytes.data() + 8, header.version);
  store_le(bytes.data() + 12, static_cast<std::uint32_t>(kHeaderBlockBytes));
  std::copy(header.name_space.begin(), header.name_space.end(), bytes.begin() + 16);
  store_le(bytes.data() + 48, header.page_bytes);
  store_le(bytes.data() + 56, header.slot_bytes);
  store_le(bytes.data() + 64, header.created_unix_ns);
  store_le(bytes.data() + 72, static_cast<std::uint64_t>(kRecordBytes));
  seal(bytes);
  return bytes;
}

std::optional<TableHeader> decode_header(std::span<const std::byte, kHeaderBytes> bytes) {
  if (!has_text(bytes, kTableMagic) || !is_sealed(bytes)) return std::nullopt;
  TableHeader header;
  header.version = load_le<std::uint32_t>(bytes.data() + 8);
  std::copy_n(bytes.begin() + 16, kDigestBytes, header.name_space.begin());
  header.page_bytes = load_le<std::uint64_t>(bytes.data() + 48);
  header.slot_bytes = load_le<std::uint64_t>(bytes.data() + 56);
  header.created_unix_ns = load_le<std::int64_t>(bytes.data() + 64);
  return header;
}

std::array<std::byte, kWriterMarkBytes> encode_writer_mark(const WriterMark& mark) {
  std::array<std::byte, kWriterMarkBytes> bytes{};
  put_text(bytes, 0, kWriterMagic);
  store_le(bytes.data() + 8, std::uint64_t{mark.process_id});
  store_le(bytes.data() + 16, mark.since_unix_ns);
  seal(bytes);
  return bytes;
}

std::optional<WriterMark> decode_writer_mark(std::span<const std::byte, kWriterMarkBytes> bytes) {
  if (!has_text(bytes, kWriterMagic) || !is_sealed(bytes)) return std::nullopt;
  return WriterMark{.process_id = load_le<std::uint32_t>(bytes.data() + 8),
                    .since_unix_ns = load_le<std::int64_t>(bytes.data() + 16)};
}

namespace {
constexpr std::int64_t kGenerationEpochUnixNs = 1'735'689'600'000'000'000;  // 2025-01-01
constexpr std::int64_t kGenerationStepNs = 10'000;
}  // namespace

std::uint64_t generation_at(std::int64_t unix_ns) {
  const std::int64_t steps = std::max<std::int64_t>(0, unix_ns - kGenerationEpochUnixNs) / kGenerationStepNs;
  return std::min(static_cast<std::uint64_t>(steps), kGenerationMax);
}

std::int64_t generation_unix_ns(std::uint64_t generation) {
  return kGenerationEpochUnixNs + static_cast<std::int64_t>(generation & kGenerationMax) * kGenerationStepNs;
}

std::uint64_t record_seed(const Digest& name_space) {
  return base::checksum64(name_space);
}

std::array<std::byte, kRecordBytes> encode_record(const SlotRecord& record, std::uint64_t seed,
                                                  index::SlotId slot) {
  std::array<std::byte, kRecordBytes> bytes{};
  store_le(bytes.data() + 4, record.length_bytes);
  std::copy(record.key.bytes.begin(), record.key.bytes.end(), bytes.begin() + 8);
  store_le(bytes.data() + 40, record.payload_checksum);
  store_le(bytes.data() + 48, pack(record.generation, record.ancestry.depth));
  store_le(bytes.data() + 56, pack(record.ancestry.parent, record.flags));
  store_le(bytes.data(), record_checksum(bytes, seed, slot));
  return bytes;
}

std::optional<SlotRecord> decode_record(std::span<const std::byte, kRecordBytes> bytes, std::uint64_t seed,
                                        index::SlotId slot) {
  if (is_clear(bytes)) return std::nullopt;
  if (load_le<std::uint32_t>(bytes.data()) != record_checksum(bytes, seed, slot)) return std::nullopt;
  SlotRecord record;
  record.length_bytes = load_le<std::uint32_t>(bytes.data() + 4);
  std::copy_n(bytes.begin() + 8, index::kKeyBytes, record.key.bytes.begin());
  record.payload_checksum = load_le<std::uint64_t>(bytes.data() + 40);
  const auto generation_depth = load_le<std::uint64_t>(bytes.data() + 48);
  const auto parent_flags = load_le<std::uint64_t>(bytes.data() + 56);
  record.generation = generation_depth & kGenerationMax;
  record.ancestry.depth = static_cast<std::uint16_t>(generation_depth >> 48);
  record.ancestry.parent = parent_flags & kGenerationMax;
  record.flags = static_cast<std::uint16_t>(parent_flags >> 48);
  return record;
}

bool is_clear(std::span<const std::byte, kRecordBytes> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

std::uint64_t payload_seed(const index::PageKey& key, std::uint64_t generation) {
  return base::checksum64(key.bytes, generation);
}

}  // namespace tpusync::flash
