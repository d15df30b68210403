// A peer: another endpoint, the streams to it, and what was submitted for it and is not resolved.
//
//   opening --all streams joined--> open --a stream is lost, disconnect--> lost
//      `------------------- a stream is lost, deadline ---------------------^
//
// Lost is for ever: whoever connects again gets another peer. A transfer of a lost peer resolves once all its
// streams are closed, when this side reads no byte of it any more.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tpusync/exec/ticket.h"
#include "tpusync/transport/hub.h"
#include "tpusync/transport/loop.h"
#include "tpusync/transport/transfer.h"

namespace tpusync::transport {

// A frame to send; the stream adds sequence, checksum and tag.
struct OutFrame {
  wire::Head head;
  wire::Bytes table;
  Slice payload;
  TransferRef transfer;          // null for a frame that nobody waits for
  std::size_t window_bytes = 0;  // what it takes of the peer's bytes in flight
};

// How a peer reaches its streams, from any thread.
class StreamPort {
 public:
  virtual ~StreamPort() = default;
  virtual void wake() = 0;
  virtual void close(const base::Error& why) = 0;
};

// Thread-safe.
class Peer {
 public:
  enum class State : std::uint8_t { kOpening, kOpen, kLost };

  Peer(Hub& hub, PeerId id, const wire::Hello& session, std::string remote, bool same_host);

  PeerId id() const { return id_; }
  std::uint64_t generation() const { return session_.generation; }
  const wire::EndpointId& initiator() const { return session_.initiator; }
  const std::string& remote() const { return remote_; }
  bool same_host() const { return same_host_; }
  State state() const;
  // The endpoint on the other side; zeros until a stream is open.
  wire::EndpointId endpoint() const;
  // Done when the peer is open, or lost before it was.
  exec::Ticket opened() const { return opened_.ticket(); }

  // kInvalid for an index that is out of range or taken; kDisconnected when lost.
  base::Status join(std::uint16_t index, std::shared_ptr<StreamPort> stream,
                    const wire::EndpointId& endpoint);
  // A dialled stream that is not open yet: closed with the others.
  void attach(std::shared_ptr<StreamPort> stream);
  // The first call decides why. Closes all streams.
  void lose(const base::Error& why);

  // kDisconnected when lost, kBusy at a limit. The ticket of `transfer` resolves only after an ok.
  base::Status submit(TransferRef transfer);

  // The next frame for a stream that can send. False: nothing to send now; `retry` is when pacing allows
  // more.
  bool next_frame(std::uint16_t stream, Time now, OutFrame& out, Time& retry);
  // `frames` of a stream are dealt with: acknowledged, refused, or lost with it.
  struct Sent {
    TransferRef transfer;
    std::size_t window_bytes = 0;
    std::uint64_t sequence = 0;
  };
  void resolve(std::span<const Sent> frames, const base::Status& status);
  // Resolves what was cancelled or whose deadline passed while it waited.
  void tick(Time now);

  std::size_t queued_bytes() const;

 private:
  using Finished = std::vector<std::pair<exec::TicketSource, base::Status>>;

  bool next_urgent(OutFrame& out);
  bool next_write(Time now, OutFrame& out, Time& retry, Finished& finished);
  bool is_offered(const Transfer& transfer) const;
  void fill_write(Transfer& transfer, bool offer, OutFrame& out);
  void request_shares(const Transfer& transfer);
  void settle(Transfer& transfer, Finished& finished);
  void stop(Transfer& transfer, base::Status status, Finished& finished);
  void wake_idle(std::size_t count);
  static void finish(Finished& finished);

  Hub& hub_;
  const PeerId id_;
  const wire::Hello session_;
  const std::string remote_;
  const bool same_host_;
  const exec::TicketSource opened_;

  mutable std::mutex mutex_;
  State state_ = State::kOpening;
  std::optional<base::Error> why_;
  wire::EndpointId endpoint_{};
  std::vector<std::shared_ptr<StreamPort>> joined_;  // by index
  std::vector<std::shared_ptr<StreamPort>> attached_;
  std::vector<bool> idle_;  // by index
  std::size_t num_joined_ = 0;
  std::deque<TransferRef> urgent_;  // messages and shares: before all writes
  std::deque<TransferRef> writes_;
  std::uint64_t last_transfer_ = 0;
  std::size_t queued_bytes_ = 0;
  std::size_t inflight_bytes_ = 0;
  std::unordered_map<RegionId, bool> shares_;  // asked for -> granted
};

}  // namespace tpusync::transport
