// A stream: one connection to a peer, from its first byte to its last.
//
//   connecting --> handshake --> open --> closed
//        `-------------`-----------^
//
// It takes frames from its peer whenever the socket has room, so that streams share the work by speed. No
// frame goes either way before all streams of the peer are open: whoever is heard of is there.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "tpusync/transport/fetch.h"
#include "tpusync/transport/handshake.h"
#include "tpusync/transport/hub.h"
#include "tpusync/transport/inbound.h"
#include "tpusync/transport/loop.h"
#include "tpusync/transport/outbound.h"
#include "tpusync/transport/peer.h"

namespace tpusync::transport {

// Confined to the thread of its loop, but for wake() and close().
class Stream final : public Handler,
                     public StreamPort,
                     public FrameSink,
                     public std::enable_shared_from_this<Stream> {
 public:
  // One under way to a peer; `hello` says which stream of it this is.
  static std::shared_ptr<Stream> dialled(Hub& hub, Loop& loop, Fd fd, PeerRef peer, const wire::Hello& hello);
  // One that a stranger opened.
  static std::shared_ptr<Stream> accepted(Hub& hub, Loop& loop, Fd fd, std::string remote, bool same_host);
  Stream(Hub& hub, Loop& loop, Fd fd, std::string remote, bool same_host, Handshake handshake);

  // Begins; from any thread, once.
  void start();

  void wake() override;
  void close(const base::Error& why) override;
  // Looks whether the grant of what is landing was revoked.
  void drop_revoked();

 private:
  enum class State : std::uint8_t { kConnecting, kHandshake, kOpen, kClosed };

  void on_ready(std::uint32_t epoll_events) override;
  Time on_tick(Time now) override;
  void on_stop() override;
  base::Result<Landing> on_data(std::span<const std::byte> table) override;
  base::Status on_landed(const wire::Head& head, base::Status status) override;
  base::Status on_control(const wire::Head& head, std::span<const std::byte> table) override;

  base::Status shake_hands();
  base::Status flush_handshake();
  base::Status enter_open();
  bool may_talk();
  base::Status receive();
  base::Status send();
  base::Status send_round();
  void load_control(wire::FrameType type, wire::Bytes table);
  void load_acknowledgement();
  base::Status handle_offer(const wire::Head& head, std::span<const std::byte> table);
  base::Status handle_ack(std::uint64_t sequence);
  base::Status handle_refusal(const wire::RefuseTable& refusal);
  void resolve_until(std::uint64_t sequence);
  base::Status settle(const wire::Head& head, const base::Status& status);
  base::Status check_time(Time now);
  void watch(std::uint32_t epoll_events);
  void shut(const base::Error& why);

  Hub& hub_;
  Loop& loop_;
  Fd fd_;
  const std::string remote_;
  const bool same_host_;
  State state_ = State::kConnecting;
  bool peer_is_open_ = false;
  std::uint32_t watched_ = 0;
  std::atomic<bool> wake_posted_{false};  // relaxed: posting twice is harmless
  PeerRef peer_;

  Handshake handshake_;
  wire::Bytes handshake_out_;
  wire::Bytes handshake_in_;

  std::optional<Inbound> inbound_;
  std::optional<Outbound> outbound_;
  Fetcher fetcher_;
  std::uint64_t received_ = 0;      // frames that want an acknowledgement: sequence of the last, plus one
  std::uint64_t acknowledged_ = 0;  // as above, as told to the other side
  Time started_{};
  Time last_sent_{};
  Time last_heard_{};
  Time last_progress_{};  // something was acknowledged, or nothing was out
  Time last_tick_{};
  Time retry_ = Time::max();  // pacing lets the next frame go then
};

}  // namespace tpusync::transport
