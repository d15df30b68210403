// What was submitted for one peer and is not resolved yet, and how it is cut into frames.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tpusync/exec/ticket.h"
#include "tpusync/transport/region.h"
#include "tpusync/wire/frame.h"

namespace tpusync::transport {

// One stretch of bytes to write: from registered memory here to a range of a region of the peer.
struct Piece {
  const std::byte* from = nullptr;
  RegionId region = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
};

// A write, a message or a share of a region. Its peer's lock guards everything but `ticket`.
struct Transfer {
  enum class Kind : std::uint8_t { kWrite, kMessage, kShare };

  Kind kind = Kind::kWrite;
  std::uint64_t id = 0;
  exec::TicketSource ticket;
  exec::Deadline deadline;

  // A write.
  std::uint64_t grant = 0;
  std::vector<Piece> pieces;
  std::vector<RegionRef> sources;  // of pieces[i]; keeps the region registered
  std::size_t length_bytes = 0;
  // A message, or a region to share: only its numbers, so that it may be released meanwhile.
  wire::Bytes message;
  Region shared{};

  std::size_t at_piece = 0;
  std::size_t at_byte = 0;     // of that piece
  std::size_t frames_out = 0;  // given to a stream and not resolved
  bool stopped = false;        // no further frame: all are out, or `status` is an error
  base::Status status;

  bool resolved() const { return stopped && frames_out == 0; }
};

using TransferRef = std::shared_ptr<Transfer>;

// Joins pieces that are neighbours on both sides.
void merge_pieces(Transfer& transfer);

// What one frame carries of a write.
struct Slice {
  std::vector<wire::DataEntry> entries;
  std::vector<iovec> from;
  std::vector<RegionRef> sources;  // of each entry
  std::size_t bytes = 0;
};

// The next slice of at most `bytes_max` and kEntriesMax entries; moves the cursor. Empty at the end.
Slice take_slice(Transfer& transfer, std::size_t bytes_max);

}  // namespace tpusync::transport
