#include "tpusync/transport/listener.h"

#include <fmt/format.h>
#include <sys/epoll.h>

#include "tpusync/transport/stream.h"

namespace tpusync::transport {

using base::Code;

namespace {

constexpr auto kPause = std::chrono::milliseconds(100);

}  // namespace

void Listener::on_ready(std::uint32_t) {
  while (true) {
    base::Result<Fd> fd = accept_from(fd_.get());
    if (fd) {
      take(*std::move(fd));
    } else {
      if (fd.error().code == Code::kExhausted) pause();
      return;
    }
  }
}

Time Listener::on_tick(Time now) {
  if (now < resume_) return resume_;
  if (resume_ != Time{}) loop_.change(this, fd_.get(), EPOLLIN);
  resume_ = Time{};
  return Time::max();
}

void Listener::take(Fd fd) {
  const auto pending = hub_.counters.num_handshakes.load(std::memory_order_relaxed);
  if (pending >= hub_.options.num_handshakes_max) {
    hub_.report_refused("?", {Code::kBusy, fmt::format("num_handshakes_max: {} are under way", pending)});
    return;
  }
  const std::string remote = remote_of(fd.get());
  Stream::accepted(hub_, next_loop_(), std::move(fd), remote, same_host_)->start();
}

// Who waits stays in the backlog; trying again at once would only burn the processor.
void Listener::pause() {
  hub_.report_refused("?", {Code::kExhausted, "no file descriptor is left"});
  loop_.change(this, fd_.get(), 0);
  resume_ = std::chrono::steady_clock::now() + kPause;
  loop_.tick_by(resume_);
}

}  // namespace tpusync::transport
