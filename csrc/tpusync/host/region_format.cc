#include "tpusync/host/region_format.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "tpusync/base/bytes.h"
#include "tpusync/base/checksum.h"

namespace tpusync::host {

using base::Code;
using base::load_le;
using base::Result;
using base::round_up;
using base::Status;
using base::store_le;

namespace {

constexpr std::uint64_t kMagic = 0x314d415244505554;  // "TUPDRAM1"
constexpr std::size_t kNamespaceOffset = 24;
constexpr std::size_t kChecksumOffset = 96;
constexpr std::size_t kPiecesOffset = 1024;
static_assert(kPiecesOffset + kNumPiecesMax * sizeof(std::uint64_t) <= kWriterStateOffset[0]);
static_assert(kWriterStateOffset[0] + kWriterStateBytes <= kWriterStateOffset[1]);
static_assert(kWriterStateOffset[1] + kWriterStateBytes <= kHeaderBytes);
constexpr std::uint64_t kGrowthFactor = 2;
constexpr std::uint64_t kSpanBytesMax = std::uint64_t{1} << 50;

std::uint64_t header_checksum(std::span<const std::byte, kHeaderBytes> bytes, std::size_t num_pieces) {
  base::Checksum checksum(kMagic);
  checksum.update(bytes.first(kChecksumOffset));
  checksum.update(bytes.subspan(kPiecesOffset, num_pieces * sizeof(std::uint64_t)));
  return checksum.value();
}

bool spans_hold_pages(const RegionHeader& header) {
  const bool sane = Geometry{header.piece_bytes, 1}.validate().has_value() && header.num_slots_max >= 1 &&
                    header.num_slots_max <= kGrowthFactor * kNumSlotsMax &&
                    header.payload_span_bytes <= kSpanBytesMax &&
                    base::is_aligned(header.payload_span_bytes, kSpanAlignBytes);
  if (!sane) return false;
  const std::uint64_t widest = header.split
                                   ? *std::max_element(header.piece_bytes.begin(), header.piece_bytes.end())
                                   : header.page_bytes();
  return widest <= header.payload_span_bytes / header.num_slots_max;
}

}  // namespace

std::uint64_t Geometry::page_bytes() const {
  return std::accumulate(piece_bytes.begin(), piece_bytes.end(), std::uint64_t{0});
}

std::vector<std::uint64_t> Geometry::piece_offsets() const {
  std::vector<std::uint64_t> offsets;
  std::uint64_t offset = 0;
  for (const std::uint64_t bytes : piece_bytes) {
    offsets.push_back(offset);
    offset += bytes * num_slots;
  }
  return offsets;
}

Status Geometry::validate() const {
  if (num_slots == 0 || num_slots > kNumSlotsMax) {
    return base::fail(Code::kInvalid,
                      fmt::format("num_slots: {}, allowed are 1 to {}", num_slots, kNumSlotsMax));
  }
  if (piece_bytes.empty() || piece_bytes.size() > kNumPiecesMax) {
    return base::fail(Code::kInvalid, fmt::format("piece_bytes: {} pieces, allowed are 1 to {}",
                                                  piece_bytes.size(), kNumPiecesMax));
  }
  std::uint64_t total = 0;
  for (const std::uint64_t bytes : piece_bytes) {
    total += bytes;
    if (bytes == 0 || bytes > kPageBytesMax || total > kPageBytesMax) {
      return base::fail(Code::kInvalid,
                        fmt::format("piece_bytes: {} in a page of {}, allowed are 1 to {} for a page", bytes,
                                    total, kPageBytesMax));
    }
  }
  return {};
}

std::uint64_t RegionHeader::num_buckets() const {
  return std::bit_ceil(num_slots_max);
}

std::uint64_t RegionHeader::table_span_bytes() const {
  return round_up(bucket_offset() + num_buckets() * sizeof(std::uint32_t), kSpanAlignBytes);
}

RegionHeader make_header(const Geometry& geometry, const Digest& name_space, std::uint64_t map_align_bytes,
                         std::int64_t now_unix_ns) {
  RegionHeader header{
      .name_space = name_space, .piece_bytes = geometry.piece_bytes, .created_unix_ns = now_unix_ns};
  header.split = true;
  header.split =
      fits({.piece_bytes = geometry.piece_bytes, .split = true, .num_slots_max = geometry.num_slots},
           geometry.num_slots, map_align_bytes);
  header.num_slots_max = header.split ? geometry.num_slots * kGrowthFactor : geometry.num_slots;
  std::uint64_t span_bytes = header.page_bytes() * header.num_slots_max;
  if (header.split) {
    span_bytes = 0;
    for (const std::uint64_t bytes : header.piece_bytes)
      span_bytes = std::max(span_bytes, bytes * header.num_slots_max);
  }
  header.payload_span_bytes = round_up(span_bytes, std::max(kSpanAlignBytes, map_align_bytes));
  return header;
}

bool fits(const RegionHeader& header, std::uint64_t num_slots, std::uint64_t map_align_bytes) {
  if (!header.split) return num_slots == header.num_slots_max;
  if (num_slots > header.num_slots_max) return false;
  for (std::size_t i = 0; i + 1 < header.piece_bytes.size(); ++i) {
    if (!base::is_aligned(header.piece_bytes[i] * num_slots, map_align_bytes)) return false;
  }
  return true;
}

void encode_header(const RegionHeader& header, std::span<std::byte, kHeaderBytes> to) {
  std::memset(to.data(), 0, kWriterStateOffset[0]);
  store_le<std::uint64_t>(to.data(), kMagic);
  store_le<std::uint32_t>(to.data() + 8, header.version);
  store_le<std::uint32_t>(to.data() + 12, static_cast<std::uint32_t>(header.piece_bytes.size()));
  store_le<std::uint32_t>(to.data() + 16, header.split ? 1 : 0);
  std::memcpy(to.data() + kNamespaceOffset, header.name_space.data(), kDigestBytes);
  store_le<std::uint64_t>(to.data() + 56, header.num_slots_max);
  store_le<std::uint64_t>(to.data() + 64, header.payload_span_bytes);
  store_le<std::int64_t>(to.data() + 72, header.created_unix_ns);
  for (std::size_t i = 0; i < header.piece_bytes.size(); ++i) {
    store_le<std::uint64_t>(to.data() + kPiecesOffset + i * sizeof(std::uint64_t), header.piece_bytes[i]);
  }
  store_le<std::uint64_t>(to.data() + kChecksumOffset, header_checksum(to, header.piece_bytes.size()));
}

Result<RegionHeader> decode_header(std::span<const std::byte, kHeaderBytes> bytes) {
  if (load_le<std::uint64_t>(bytes.data()) != kMagic) {
    return base::fail(Code::kCorrupt, "the file does not begin with a region header");
  }
  RegionHeader header;
  header.version = load_le<std::uint32_t>(bytes.data() + 8);
  if (header.version != kFormatVersion) {
    return base::fail(Code::kUnsupported, fmt::format("the region has format version {}, this build knows {}",
                                                      header.version, kFormatVersion));
  }
  const std::uint32_t num_pieces = load_le<std::uint32_t>(bytes.data() + 12);
  if (num_pieces == 0 || num_pieces > kNumPiecesMax ||
      load_le<std::uint64_t>(bytes.data() + kChecksumOffset) != header_checksum(bytes, num_pieces)) {
    return base::fail(Code::kCorrupt, "the region header is damaged");
  }
  header.split = load_le<std::uint32_t>(bytes.data() + 16) != 0;
  std::memcpy(header.name_space.data(), bytes.data() + kNamespaceOffset, kDigestBytes);
  header.num_slots_max = load_le<std::uint64_t>(bytes.data() + 56);
  header.payload_span_bytes = load_le<std::uint64_t>(bytes.data() + 64);
  header.created_unix_ns = load_le<std::int64_t>(bytes.data() + 72);
  for (std::size_t i = 0; i < num_pieces; ++i) {
    header.piece_bytes.push_back(
        load_le<std::uint64_t>(bytes.data() + kPiecesOffset + i * sizeof(std::uint64_t)));
  }
  // A checksum proves that it was written like this, not that whoever wrote it was right.
  if (!spans_hold_pages(header)) {
    return base::fail(Code::kCorrupt, "the region header has spans that do not hold its pages");
  }
  return header;
}

std::array<std::byte, kWriterStateBytes> encode_writer_state(const WriterState& state) {
  std::array<std::byte, kWriterStateBytes> bytes{};
  store_le<std::uint64_t>(bytes.data(), state.epoch);
  store_le<std::uint64_t>(bytes.data() + 8, state.num_slots);
  store_le<std::uint64_t>(bytes.data() + 16, state.process_id);
  store_le<std::int64_t>(bytes.data() + 24, state.since_unix_ns);
  store_le<std::uint64_t>(bytes.data() + 32, base::checksum64(std::span(bytes).first(32), kMagic));
  return bytes;
}

std::optional<WriterState> decode_writer_state(std::span<const std::byte, kWriterStateBytes> bytes) {
  WriterState state;
  state.epoch = load_le<std::uint64_t>(bytes.data());
  state.num_slots = load_le<std::uint64_t>(bytes.data() + 8);
  state.process_id = static_cast<std::uint32_t>(load_le<std::uint64_t>(bytes.data() + 16));
  state.since_unix_ns = load_le<std::int64_t>(bytes.data() + 24);
  const bool whole = load_le<std::uint64_t>(bytes.data() + 32) == base::checksum64(bytes.first(32), kMagic);
  if (!whole || state.epoch == 0 || state.epoch > kEpochMax || state.num_slots == 0) return std::nullopt;
  return state;
}

bool Seal::operator==(const Seal& other) const {
  return key == other.key && ancestry.parent == other.ancestry.parent &&
         ancestry.depth == other.ancestry.depth && generation == other.generation &&
         payload_checksum == other.payload_checksum && length_bytes == other.length_bytes;
}

std::uint64_t namespace_seed(const Digest& name_space) {
  return base::checksum64(name_space, kFormatVersion);
}

namespace {

// The checksum of all of a record but its own last four bytes.
std::uint32_t record_checksum(const SealWords& words, std::uint64_t seed, index::SlotId slot) {
  const auto bytes = std::as_bytes(std::span(words)).first(kSealBytes - sizeof(std::uint32_t));
  return static_cast<std::uint32_t>(base::checksum64(bytes, seed + index::to_number(slot)));
}

}  // namespace

SealWords encode_seal(const Seal& seal, std::uint64_t seed, index::SlotId slot) {
  SealWords words{};
  words[0] = seal.generation << 1 | 1;
  std::memcpy(&words[1], seal.key.bytes.data(), index::kKeyBytes);
  words[5] = seal.payload_checksum;
  words[6] = (seal.ancestry.parent & index::PageKey::kShortHashMask) | std::uint64_t{seal.ancestry.depth}
                                                                           << 48;
  words[7] = seal.length_bytes;
  words[7] |= std::uint64_t{record_checksum(words, seed, slot)} << 32;
  return words;
}

std::optional<Seal> decode_seal(const SealWords& words, std::uint64_t seed, index::SlotId slot) {
  if ((words[0] & 1) == 0 || words[7] >> 32 != record_checksum(words, seed, slot)) return std::nullopt;
  Seal seal;
  seal.generation = words[0] >> 1;
  std::memcpy(seal.key.bytes.data(), &words[1], index::kKeyBytes);
  seal.payload_checksum = words[5];
  seal.ancestry.parent = words[6] & index::PageKey::kShortHashMask;
  seal.ancestry.depth = static_cast<std::uint16_t>(words[6] >> 48);
  seal.length_bytes = static_cast<std::uint32_t>(words[7]);
  return seal;
}

std::uint64_t payload_seed(std::uint64_t namespace_seed, const index::PageKey& key) {
  return base::checksum64(key.bytes, namespace_seed);
}

}  // namespace tpusync::host
