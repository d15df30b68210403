// What all peers and streams of one endpoint share.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "tpusync/transport/grant.h"
#include "tpusync/transport/inbox.h"
#include "tpusync/transport/options.h"
#include "tpusync/transport/pacer.h"
#include "tpusync/transport/region.h"
#include "tpusync/transport/secret.h"
#include "tpusync/wire/auth.h"

namespace tpusync::transport {

class Peer;

using PeerRef = std::shared_ptr<Peer>;

// Monotone, but for the gauges at the end. Relaxed: nobody orders anything by them, except that a stream
// which has left num_streams has left its traces in the others.
struct Counters {
  std::atomic<std::uint64_t> sent_bytes{0};    // of payload, acknowledged or not
  std::atomic<std::uint64_t> landed_bytes{0};  // of payload, verified
  std::atomic<std::uint64_t> fetched_bytes{
      0};  // of landed_bytes: read from the memory of a peer on this host
  std::atomic<std::uint64_t> frames_sent{0};
  std::atomic<std::uint64_t> frames_received{0};
  std::atomic<std::uint64_t> frames_refused{0};  // by this endpoint
  std::atomic<std::uint64_t> frames_corrupt{0};  // of those: the checksum of the payload was wrong
  std::atomic<std::uint64_t> handshakes_refused{0};
  std::atomic<std::uint64_t> peers_lost{0};
  std::atomic<std::uint64_t> peers_silent{0};    // of those: nothing was heard, or nothing got done
  std::atomic<std::uint64_t> num_handshakes{0};  // streams that are not open yet
  std::atomic<std::uint64_t> num_streams{0};
};

// Thread-safe. Outlives every peer and stream.
class Hub {
 public:
  Hub(Options options_in, Secret secret_in)
      : options(std::move(options_in)),
        secret(std::move(secret_in)),
        grants(regions, options.num_grants_max),
        pacer(options.rate_bytes_per_s_max, 4 * options.frame_bytes) {
    wire::fill_random(id);
  }
  virtual ~Hub() = default;

  // The peer that a stream, whose initiator proved to know the secret, belongs to. kBusy or kInvalid refuse
  // it.
  virtual base::Result<PeerRef> admit(const wire::Hello& hello, const std::string& remote,
                                      bool same_host) = 0;
  // False when that peer has as much in the inbox as it may.
  virtual bool deliver_message(PeerId from, std::span<const std::byte> message) = 0;
  // Called once per peer; `was_open` is false for one that never got there.
  virtual void deliver_lost(PeerId peer, const base::Error& why, bool was_open) = 0;
  virtual void report_refused(const std::string& remote, const base::Error& why) = 0;

  const Options options;
  const Secret secret;
  wire::EndpointId id;
  RegionTable regions;
  GrantTable grants;
  Pacer pacer;
  Counters counters;
};

}  // namespace tpusync::transport
