// What an endpoint has received and nobody has taken yet: messages of peers, and the news that peers are
// lost.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "tpusync/exec/ticket.h"

namespace tpusync::transport {

using PeerId = std::uint64_t;  // never 0, never used twice by one endpoint

struct Event {
  enum class Kind : std::uint8_t { kMessage, kLost };
  Kind kind = Kind::kMessage;
  PeerId peer = 0;
  std::vector<std::byte> message;  // of kMessage
  std::string reason;              // of kLost
};

// Thread-safe. What one peer may leave here is limited for that peer alone: one that floods keeps nobody else
// out.
class Inbox {
 public:
  Inbox(std::size_t messages_max, std::size_t bytes_max)
      : messages_max_(messages_max), bytes_max_(bytes_max) {}

  // False when this peer has reached its limit, or the inbox is closed.
  bool push_message(PeerId from, std::span<const std::byte> message);
  // Peers that come and go while nobody listens do not fill the memory: beyond a limit the news is dropped,
  // and calls that name the peer tell that it is gone.
  void push_lost(PeerId peer, std::string reason);

  // Waits for events until there is one, `deadline` passes or the inbox is closed; at most `count_max`.
  std::vector<Event> take(std::size_t count_max, exec::Deadline deadline);

  // Wakes everybody who waits; what is there may still be taken.
  void close();

 private:
  struct Held {
    std::size_t num_messages = 0;
    std::size_t bytes = 0;
  };

  const std::size_t messages_max_;
  const std::size_t bytes_max_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Event> events_;
  std::unordered_map<PeerId, Held> held_;  // peers with messages in events_
  std::size_t num_lost_ = 0;               // in events_
  bool closed_ = false;
};

}  // namespace tpusync::transport
