// The bytes of a DRAM region's file, version 1. The document is docs/formats/region-v1.md; this is its
// encoder and decoder. Everything is little-endian.
//
//   [header 16 KiB][seal record 64]*[chain 4]*[bucket 4]* ... span 0
//   [piece 0 of slot 0][piece 0 of slot 1] ...                span 1
//   [piece 1 of slot 0] ...                                   span 2, and so on
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/index/page_key.h"
#include "tpusync/index/prefix_index.h"

namespace tpusync::host {

inline constexpr std::uint32_t kFormatVersion = 1;
inline constexpr std::size_t kHeaderBytes = 16384;
inline constexpr std::size_t kSealBytes = 64;
inline constexpr std::size_t kDigestBytes = 32;
inline constexpr std::size_t kNumPiecesMax = 1024;
inline constexpr std::uint64_t kNumSlotsMax = std::uint64_t{1} << 31;
inline constexpr std::uint64_t kPageBytesMax = 0xffffffffu;
// Spans begin at multiples of it, whatever the size of a memory page is.
inline constexpr std::uint64_t kSpanAlignBytes = std::uint64_t{2} << 20;

using Digest = std::array<std::byte, kDigestBytes>;  // of the identity: the namespace

// Where the pieces of a page lie in the memory that the region hands out: piece p of slot s is piece_bytes[p]
// long and begins at piece_offset(p) + s * piece_bytes[p], as in a tensor of shape [pieces][slots][...]. A
// value.
struct Geometry {
  std::vector<std::uint64_t> piece_bytes;
  std::uint64_t num_slots = 0;

  std::uint64_t page_bytes() const;
  std::uint64_t payload_bytes() const { return page_bytes() * num_slots; }
  std::vector<std::uint64_t> piece_offsets() const;
  // kInvalid with the first number that is out of its range.
  base::Status validate() const;
  bool operator==(const Geometry&) const = default;
};

// Never changes in the life of a file.
struct RegionHeader {
  std::uint32_t version = kFormatVersion;
  Digest name_space{};
  std::vector<std::uint64_t> piece_bytes;
  bool split =
      true;  // every piece has a span of its own, so that num_slots may change; else one span has all
  std::uint64_t num_slots_max = 0;
  std::uint64_t payload_span_bytes = 0;
  std::int64_t created_unix_ns = 0;
  bool operator==(const RegionHeader&) const = default;

  std::uint64_t page_bytes() const { return Geometry{piece_bytes, 1}.page_bytes(); }
  std::size_t num_spans() const { return split ? piece_bytes.size() : 1; }
  std::uint64_t num_buckets() const;  // a power of two
  std::uint64_t chain_offset() const { return kHeaderBytes + num_slots_max * kSealBytes; }
  std::uint64_t bucket_offset() const { return chain_offset() + num_slots_max * sizeof(std::uint32_t); }
  std::uint64_t table_span_bytes() const;
  std::uint64_t payload_offset(std::size_t span) const {
    return table_span_bytes() + span * payload_span_bytes;
  }
  std::uint64_t file_bytes() const { return payload_offset(num_spans()); }
};

// The header of a new region: room to grow to twice the slots. `map_align_bytes` is the file system's.
RegionHeader make_header(const Geometry& geometry, const Digest& name_space, std::uint64_t map_align_bytes,
                         std::int64_t now_unix_ns);
// Whether pages of a region with this header keep their places when it has `num_slots` slots.
bool fits(const RegionHeader& header, std::uint64_t num_slots, std::uint64_t map_align_bytes);

void encode_header(const RegionHeader& header, std::span<std::byte, kHeaderBytes> to);
// kCorrupt: damaged or no header at all; kUnsupported: of a newer version.
base::Result<RegionHeader> decode_header(std::span<const std::byte, kHeaderBytes> bytes);

// What the writer of the moment says. Two copies are kept and written in turn, so that one of them is whole
// whenever the writer dies; the one with the higher epoch counts.
struct WriterState {
  std::uint64_t epoch = 0;  // grows with every adoption and every change of num_slots; below 2**23
  std::uint64_t num_slots = 0;
  std::uint32_t process_id = 0;  // for people to read: the lock decides
  std::int64_t since_unix_ns = 0;
  bool operator==(const WriterState&) const = default;
};
inline constexpr std::uint64_t kEpochMax = (std::uint64_t{1} << 23) - 1;
inline constexpr std::size_t kWriterStateBytes = 40;
inline constexpr std::size_t kWriterStateOffset[2] = {kHeaderBytes - 256, kHeaderBytes - 128};

std::array<std::byte, kWriterStateBytes> encode_writer_state(const WriterState& state);
std::optional<WriterState> decode_writer_state(std::span<const std::byte, kWriterStateBytes> bytes);

// What a slot holds. Word 0 is `generation << 1 | sealed`; a generation is `epoch << 40 | count` and never
// returns.
struct Seal {
  index::PageKey key;
  index::Ancestry ancestry;
  std::uint64_t generation = 0;
  std::uint64_t payload_checksum = 0;
  std::uint32_t length_bytes = 0;
  bool operator==(const Seal& other) const;
};
inline constexpr int kGenerationCountBits = 40;
using SealWords = std::array<std::uint64_t, kSealBytes / sizeof(std::uint64_t)>;

// Binds checksums to the namespace.
std::uint64_t namespace_seed(const Digest& name_space);

SealWords encode_seal(const Seal& seal, std::uint64_t seed, index::SlotId slot);
// Nothing: not sealed, or damaged, or of another slot or namespace.
std::optional<Seal> decode_seal(const SealWords& words, std::uint64_t seed, index::SlotId slot);

// The seed of the payload's checksum: the right bytes under a wrong key fail.
std::uint64_t payload_seed(std::uint64_t namespace_seed, const index::PageKey& key);

}  // namespace tpusync::host
