// An endpoint: one side of any number of transfers. It writes registered memory into ranges that peers have
// granted, carries small messages, and lets peers write into what it granted to them.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tpusync/metrics/metrics.h"
#include "tpusync/transport/hub.h"
#include "tpusync/transport/inbox.h"
#include "tpusync/transport/loop.h"
#include "tpusync/transport/peer.h"

namespace tpusync::transport {

struct PeerInfo {
  PeerId id = 0;
  wire::EndpointId endpoint{};
  std::string remote;
  bool same_host = false;
  std::size_t queued_bytes = 0;
};

// A resource. Thread-safe.
class Endpoint final : private Hub {
 public:
  // kInvalid for an option, kIo when an address cannot be bound.
  static base::Result<std::unique_ptr<Endpoint>> open(Options options);
  ~Endpoint() override;  // close()

  const wire::EndpointId& id() const { return Hub::id; }
  // What it listens on, with the ports that it got.
  const std::vector<std::string>& addresses() const { return addresses_; }

  // The memory must lie still until release_region answered ok.
  base::Result<RegionId> register_region(void* base, std::size_t length) {
    return regions.add(static_cast<std::byte*>(base), length);
  }
  // kBusy while a grant or a transfer needs it.
  base::Status release_region(RegionId region) { return regions.remove(region); }

  // See GrantTable. Every range stays writable by `holder` (any peer that is told the number, if none is
  // named) until the ticket of revoke_grant is done.
  base::Result<GrantId> open_grant(std::vector<Range> ranges, std::optional<wire::EndpointId> holder) {
    return grants.open(std::move(ranges), holder);
  }
  exec::Ticket revoke_grant(GrantId grant);

  // Opens num_streams streams, in turn to each of the addresses of one endpoint; one stream through shared
  // memory when it is on this host. Blocks until open; `deadline` none: handshake_s. kInvalid, kDisconnected,
  // kDeadline.
  base::Result<PeerId> connect(const std::vector<std::string>& addresses, exec::Deadline deadline);
  // What is not resolved is cancelled. kNotFound.
  base::Status disconnect(PeerId peer);

  // Ok once every byte is in the peer's memory and verified. An error leaves open which bytes have landed,
  // and after a disconnection some may be on their way: only the peer, by revoking the grant, ends that. The
  // memory of `pieces` must lie still, unchanged, until the ticket is done. kInvalid when it is not
  // registered, kNotFound, kDisconnected, kBusy at a limit.
  base::Result<exec::Ticket> submit_write(PeerId peer, GrantId grant, std::vector<Piece> pieces,
                                          exec::Deadline deadline);
  // At most 64 KiB, copied. Ok once it lies in the peer's inbox. Messages overtake writes; among themselves
  // they keep their order only on one stream.
  base::Result<exec::Ticket> submit_message(PeerId peer, std::span<const std::byte> message);

  // Waits for events until there is one or `deadline` passes; at most `count_max`. Empty also when closed.
  std::vector<Event> receive(std::size_t count_max, exec::Deadline deadline) {
    return inbox_.take(count_max, deadline);
  }

  std::vector<PeerInfo> peers() const;
  std::vector<metrics::Sample> samples() const;

  // Says goodbye, cancels what is not resolved, and returns when no byte moves any more. Idempotent.
  void close();

 private:
  Endpoint(Options options_in, Secret secret_in)
      : Hub(std::move(options_in), std::move(secret_in)),
        inbox_(options.inbox_messages_max, options.inbox_bytes_max) {}
  base::Status listen();
  base::Status listen(const std::string& text);
  base::Status check_loopback(const Address& address) const;
  Loop& next_loop();
  base::Result<PeerRef> new_peer(const wire::Hello& hello, const std::string& remote, bool same_host);
  base::Result<PeerId> connect_once(const std::vector<Address>& targets, int num_streams, bool same_host,
                                    exec::Deadline deadline);
  base::Result<PeerRef> find(PeerId peer) const;

  base::Result<PeerRef> admit(const wire::Hello& hello, const std::string& remote, bool same_host) override;
  bool deliver_message(PeerId from, std::span<const std::byte> message) override {
    return inbox_.push_message(from, message);
  }
  void deliver_lost(PeerId peer, const base::Error& why, bool was_open) override;
  void report_refused(const std::string& remote, const base::Error& why) override;

  std::vector<std::string> addresses_;
  std::vector<Address> sources_;
  std::vector<std::unique_ptr<Loop>> loops_;
  std::atomic<std::size_t> next_loop_{0};  // relaxed: any spread will do

  std::mutex close_mutex_;    // before mutex_
  mutable std::mutex mutex_;  // of what follows
  bool closed_ = false;
  PeerId last_peer_ = 0;
  std::unordered_map<PeerId, PeerRef> peers_;
  std::map<std::pair<wire::EndpointId, std::uint64_t>, PeerRef> sessions_;  // those that were accepted
  std::unordered_set<std::string> refused_hosts_;                           // named in the log

  Inbox inbox_;
};

}  // namespace tpusync::transport
