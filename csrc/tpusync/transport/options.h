// What an endpoint may be told when it opens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tpusync/base/error.h"

namespace tpusync::transport {

// A value.
struct Options {
  // Addresses to listen on: "127.0.0.1:0", "[::1]:7000"; numbers only, port 0 for a free one. Empty: dial
  // only.
  std::vector<std::string> bind = {"127.0.0.1:0"};
  // Local addresses for outgoing streams ("10.0.0.1", "fe80::1%eth0"), used in turn; empty: the kernel
  // chooses.
  std::vector<std::string> source;
  // File with the shared secret, 16 to 4096 bytes; surrounding white space is not part of it. Empty: none.
  std::string secret_file;
  // Without a secret an endpoint neither listens on nor dials anything but loopback, unless this is set.
  bool allow_unauthenticated = false;

  int num_streams = 4;                   // TCP streams per peer that is dialled; 1 to 64
  int num_io_threads = 1;                // 1 to 64
  std::size_t frame_bytes = 256 * 1024;  // payload of one frame; 4 KiB to 4 MiB
  // Checksums over payloads that go through a socket: ours have them, and those without are refused.
  bool checksum = true;
  bool same_host = true;  // fetch from the memory of a peer on this host instead of sending

  std::uint64_t rate_bytes_per_s_max = 0;               // of payload sent to all peers; 0: none
  std::size_t inflight_bytes_max = 64 * 1024 * 1024;    // sent to one peer and not acknowledged
  std::size_t queued_bytes_max = std::size_t{8} << 30;  // submitted for one peer and not sent
  std::size_t queued_transfers_max = 65536;             // submitted for one peer and not sent
  std::size_t inbox_messages_max = 4096;                // of one peer, not taken by receive()
  std::size_t inbox_bytes_max = 16 * 1024 * 1024;       // as above
  std::size_t num_peers_max = 1024;
  std::size_t num_handshakes_max = 256;  // streams that are not open yet
  std::size_t num_grants_max = 65536;

  double heartbeat_s = 0.5;  // a stream that sends nothing for this long says that it lives
  double silence_s = 2.0;    // a stream that hears nothing for this long is lost; at least 2 heartbeats
  double progress_s = 10.0;  // a stream whose oldest frame is not acknowledged for this long is lost
  double handshake_s = 2.0;  // from connection to open
};

// kInvalid names the first value that is out of its range.
base::Status validate(const Options& options);

}  // namespace tpusync::transport
