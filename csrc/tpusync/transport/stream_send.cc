// The sending side of a stream.
#include <sys/epoll.h>

#include "tpusync/transport/stream.h"

namespace tpusync::transport {

using base::Status;
using std::chrono::steady_clock;

namespace {

constexpr std::size_t kRoundBytes = 1024 * 1024;  // then the other streams of this loop have their turn

}  // namespace

Status Stream::send() {
  retry_ = Time::max();
  std::size_t written = 0;
  while (written < kRoundBytes) {
    while (outbound_->has_room()) {
      const Time now = steady_clock::now();
      OutFrame frame;
      if (outbound_->unacknowledged().empty()) last_progress_ = now;
      if (!peer_->next_frame(handshake_.hello().stream, now, frame, retry_)) break;
      hub_.counters.sent_bytes.fetch_add(frame.window_bytes, std::memory_order_relaxed);
      hub_.counters.frames_sent.fetch_add(1, std::memory_order_relaxed);
      outbound_->load(std::move(frame));
    }
    if (outbound_->empty()) break;
    const base::Result<std::size_t> count = outbound_->flush(fd_.get());
    if (!count) return tl::unexpected(count.error());
    if (*count == 0) break;
    written += *count;
  }
  if (written > 0) last_sent_ = steady_clock::now();
  if (retry_ != Time::max()) loop_.tick_by(retry_);
  const bool more = !outbound_->empty() || written >= kRoundBytes;
  watch((outbound_->overloaded() ? 0u : EPOLLIN) | (more ? EPOLLOUT : 0u));
  return {};
}

void Stream::load_control(wire::FrameType type, wire::Bytes table) {
  OutFrame frame;
  frame.head.type = type;
  frame.table = std::move(table);
  outbound_->load(std::move(frame));
}

void Stream::load_acknowledgement() {
  if (acknowledged_ == received_) return;
  acknowledged_ = received_;
  wire::Bytes table;
  wire::Writer writer(table);
  wire::encode_ack(received_ - 1, writer);
  load_control(wire::FrameType::kAck, std::move(table));
}

}  // namespace tpusync::transport
