// Frames: what two endpoints say to each other once a stream is open. docs/formats/wire-v1.md has the
// grammar.
//
//   | head, 48 bytes | table, table_bytes | tag, 16 bytes | payload, payload_bytes |
//
// The tag authenticates head and table under a key of this stream and direction; the head holds the checksum
// of the payload. Decoders take bytes from a stranger: they answer kCorrupt and never assert.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/wire/writer.h"

namespace tpusync::wire {

constexpr std::uint32_t kFrameMagic = 0x31535054;  // "TPS1"
constexpr std::size_t kHeadBytes = 48;
constexpr std::size_t kTagBytes = 16;
constexpr std::uint32_t kTableBytesMax = 64 * 1024;
constexpr std::uint32_t kPayloadBytesMax = 4 * 1024 * 1024;
constexpr std::size_t kDataEntryBytes = 16;
constexpr std::size_t kOfferEntryBytes = 32;
constexpr std::size_t kEntriesMax = 1000;  // of one frame: with head, table and tag still one writev
constexpr std::size_t kMessageBytesMax = kTableBytesMax;
constexpr std::size_t kReasonBytesMax = 512;

enum class FrameType : std::uint8_t {
  kData = 1,     // table: DataTable; payload: the bytes of its entries, one after the other
  kOffer = 2,    // table: OfferTable; the receiver fetches the bytes from a region that was shared
  kShare = 3,    // table: ShareTable; the receiver may read that memory (same host)
  kAck = 4,      // table: sequence; every frame up to it is dealt with
  kRefuse = 5,   // table: RefuseTable; frames before it are dealt with, this one failed
  kMessage = 6,  // table: bytes of the layer above
  kPing = 7,     // table empty: the sender lives
  kGoodbye = 8,  // table: RefuseTable; the sender closes the stream for the reason named
};

// The payload carries a checksum. Without it the receiver takes what came (both sides are told to).
constexpr std::uint8_t kFlagChecksum = 1;

// A value.
struct Head {
  FrameType type = FrameType::kPing;
  std::uint8_t flags = 0;
  std::uint32_t table_bytes = 0;
  std::uint32_t payload_bytes = 0;
  std::uint64_t sequence = 0;    // of this stream and direction, from 0, no gaps
  std::uint64_t generation = 0;  // of the session; a frame of another one is refused
  std::uint64_t transfer = 0;    // the sender's number of what this frame is a part of; 0 for none
  std::uint64_t checksum = 0;    // XXH3-64 of the payload
  bool operator==(const Head&) const = default;
};

// Where bytes go: a range of a region of the receiver, inside the ranges of the table's grant.
struct DataEntry {
  std::uint32_t region = 0;
  std::uint32_t length = 0;
  std::uint64_t offset = 0;
  bool operator==(const DataEntry&) const = default;
};

struct DataTable {
  std::uint64_t grant = 0;
  std::vector<DataEntry> entries;
  bool operator==(const DataTable&) const = default;
};

// Where bytes go, and where in a shared region of the sender they are.
struct OfferEntry {
  DataEntry target;
  std::uint32_t source_region = 0;
  std::uint64_t source_offset = 0;
  bool operator==(const OfferEntry&) const = default;
};

struct OfferTable {
  std::uint64_t grant = 0;
  std::vector<OfferEntry> entries;
  bool operator==(const OfferTable&) const = default;
};

// Memory of the sending process, to be read by process_vm_readv. The first byte is the kind of sharing; there
// is one so far.
constexpr std::uint8_t kShareAddress = 2;

struct ShareTable {
  std::uint32_t region = 0;
  std::uint64_t length = 0;
  std::uint64_t address = 0;
  bool operator==(const ShareTable&) const = default;
};

struct RefuseTable {
  std::uint64_t sequence = 0;  // of the refused frame; 0 in a goodbye
  base::Code code = base::Code::kIo;
  std::string reason;  // printable ASCII; anything else is replaced by '?'
  bool operator==(const RefuseTable&) const = default;
};

// Encoders. What they are given is ours and within the limits above.
void encode_head(const Head& head, Writer& out);
void encode_table(const DataTable& table, Writer& out);
void encode_table(const OfferTable& table, Writer& out);
void encode_table(const ShareTable& table, Writer& out);
void encode_table(const RefuseTable& table, Writer& out);
void encode_ack(std::uint64_t sequence, Writer& out);

// Decoders. `in` is exactly the head or the table. kCorrupt names the rule that was broken.
base::Result<Head> decode_head(std::span<const std::byte> in);
base::Result<DataTable> decode_data(std::span<const std::byte> in);
base::Result<OfferTable> decode_offer(std::span<const std::byte> in);
base::Result<ShareTable> decode_share(std::span<const std::byte> in);
base::Result<RefuseTable> decode_refuse(std::span<const std::byte> in);
base::Result<std::uint64_t> decode_ack(std::span<const std::byte> in);

}  // namespace tpusync::wire
