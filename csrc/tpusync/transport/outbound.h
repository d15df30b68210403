// The sending half of a stream: turns frames into bytes and writes them, several at once, straight from where
// their payload lies.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "tpusync/transport/peer.h"
#include "tpusync/wire/auth.h"

namespace tpusync::transport {

// Confined to the thread of its loop.
class Outbound {
 public:
  Outbound(const wire::FrameKey& key, std::uint64_t generation, bool checksum)
      : key_(key), generation_(generation), checksum_(checksum) {}

  // Numbers, checksums and signs a frame, and puts it behind those that are loaded. Its payload must lie
  // still until it is acknowledged.
  void load(OutFrame frame);
  // Whether another frame should be loaded before the next flush.
  bool has_room() const { return loaded_bytes_ < kLoadBytes && loaded_.size() < kLoadFrames; }
  bool empty() const { return loaded_.empty(); }

  // Writes what is loaded. Answers the bytes written; fewer than loaded when the socket is full.
  // kDisconnected.
  base::Result<std::size_t> flush(int fd);

  // Frames that somebody waits for and that are not acknowledged, in order.
  std::deque<Peer::Sent>& unacknowledged() { return sent_; }
  // Frames before this one are written: only they can be acknowledged by somebody honest.
  std::uint64_t first_unwritten() const {
    return loaded_.empty() ? next_sequence_ : loaded_.front().sequence;
  }
  // So many answers wait that nothing should be read that would ask for more.
  bool overloaded() const { return loaded_.size() >= kBacklogFrames; }

 private:
  static constexpr std::size_t kLoadBytes = 128 * 1024;
  static constexpr std::size_t kLoadFrames = 32;
  static constexpr std::size_t kBacklogFrames = 1024;

  struct Loaded {
    wire::Bytes bytes;  // head, table, tag
    std::vector<iovec> payload;
    std::uint64_t sequence = 0;
  };
  void drop_written(std::size_t count);

  const wire::FrameKey key_;
  const std::uint64_t generation_;
  const bool checksum_;
  std::uint64_t next_sequence_ = 0;
  std::deque<Loaded> loaded_;
  std::size_t loaded_bytes_ = 0;
  std::size_t written_bytes_ = 0;  // of the first one
  std::deque<Peer::Sent> sent_;
};

}  // namespace tpusync::transport
