// Accepts what comes to one address of an endpoint.
#pragma once

#include <functional>

#include "tpusync/transport/hub.h"
#include "tpusync/transport/loop.h"
#include "tpusync/transport/socket.h"

namespace tpusync::transport {

// Confined to its loop.
class Listener final : public Handler {
 public:
  // `next_loop` answers the loop of the next stream. `same_host`: a Unix socket.
  Listener(Hub& hub, Loop& loop, Fd fd, bool same_host, std::function<Loop&()> next_loop)
      : hub_(hub), loop_(loop), fd_(std::move(fd)), same_host_(same_host), next_loop_(std::move(next_loop)) {}
  int fd() const { return fd_.get(); }

  void on_ready(std::uint32_t epoll_events) override;
  Time on_tick(Time now) override;
  void on_stop() override {}

 private:
  void take(Fd fd);
  void pause();

  Hub& hub_;
  Loop& loop_;
  const Fd fd_;
  const bool same_host_;
  const std::function<Loop&()> next_loop_;
  Time resume_{};  // paused until then, if it is set
};

}  // namespace tpusync::transport
