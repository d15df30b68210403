#include "tpusync/transport/transfer.h"

#include <algorithm>

namespace tpusync::transport {

namespace {

bool continues(const Piece& a, const Piece& b) {
  return a.region == b.region && a.from + a.length == b.from && a.offset + a.length == b.offset;
}

}  // namespace

void merge_pieces(Transfer& transfer) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < transfer.pieces.size(); ++i) {
    const Piece piece = transfer.pieces[i];
    RegionRef source = std::move(transfer.sources[i]);
    if (kept > 0 && transfer.sources[kept - 1] == source && continues(transfer.pieces[kept - 1], piece)) {
      transfer.pieces[kept - 1].length += piece.length;
      continue;
    }
    transfer.pieces[kept] = piece;
    transfer.sources[kept] = std::move(source);
    ++kept;
  }
  transfer.pieces.resize(kept);
  transfer.sources.resize(kept);
}

Slice take_slice(Transfer& transfer, std::size_t bytes_max) {
  Slice slice;
  while (transfer.at_piece < transfer.pieces.size() && slice.bytes < bytes_max &&
         slice.entries.size() < wire::kEntriesMax) {
    const Piece& piece = transfer.pieces[transfer.at_piece];
    const std::size_t length =
        std::min<std::size_t>(piece.length - transfer.at_byte, bytes_max - slice.bytes);
    slice.entries.push_back(
        {piece.region, static_cast<std::uint32_t>(length), piece.offset + transfer.at_byte});
    slice.from.push_back({const_cast<std::byte*>(piece.from + transfer.at_byte), length});
    slice.sources.push_back(transfer.sources[transfer.at_piece]);
    slice.bytes += length;
    transfer.at_byte += length;
    if (transfer.at_byte == piece.length) {
      ++transfer.at_piece;
      transfer.at_byte = 0;
    }
  }
  return slice;
}

}  // namespace tpusync::transport
