// The other side of a connection, byte by byte: what an endpoint meets when somebody does not keep to the
// rules.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tpusync/transport/handshake.h"
#include "tpusync/transport/socket.h"
#include "tpusync/wire/frame.h"

namespace tpusync::testing {

// Thread-compatible. Blocks for at most a few seconds per call.
class RawPeer {
 public:
  // Connects; says nothing yet.
  explicit RawPeer(const std::string& address);

  // Sends bytes as they are. False when the other side has closed.
  bool send(std::span<const std::byte> bytes);
  // The next bytes; fewer than asked for when the other side closes or is silent for too long.
  std::vector<std::byte> receive(std::size_t count);
  // True when the other side has closed: nothing but an end or a reset comes any more.
  bool wait_closed(std::chrono::seconds patience = std::chrono::seconds(10));

  // The handshake as it should be. False when it was refused.
  bool shake_hands(const transport::Secret& secret, wire::Hello hello = {});

  // A frame with the right sequence, generation and tag, whatever it says.
  wire::Bytes frame(wire::Head head, std::span<const std::byte> table,
                    std::span<const std::byte> payload = {});
  const transport::Handshake& handshake() const { return *handshake_; }

  std::uint64_t next_sequence = 0;

 private:
  transport::Fd fd_;
  std::optional<transport::Handshake> handshake_;
};

}  // namespace tpusync::testing
