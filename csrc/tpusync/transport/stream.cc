#include "tpusync/transport/stream.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace tpusync::transport {

using base::Code;
using base::Error;
using base::fail;
using base::Status;
using std::chrono::steady_clock;

namespace {

std::chrono::nanoseconds seconds(double s) {
  return std::chrono::nanoseconds(static_cast<std::int64_t>(s * 1e9));
}

}  // namespace

Stream::Stream(Hub& hub, Loop& loop, Fd fd, std::string remote, bool same_host, Handshake handshake)
    : hub_(hub),
      loop_(loop),
      fd_(std::move(fd)),
      remote_(std::move(remote)),
      same_host_(same_host),
      handshake_(std::move(handshake)),
      fetcher_(same_host ? peer_process(fd_.get()) : 0) {}

std::shared_ptr<Stream> Stream::dialled(Hub& hub, Loop& loop, Fd fd, PeerRef peer, const wire::Hello& hello) {
  wire::Bytes out;
  Handshake handshake = Handshake::initiate(hub.secret, hello, out);
  auto stream = std::make_shared<Stream>(hub, loop, std::move(fd), peer->remote(), peer->same_host(),
                                         std::move(handshake));
  stream->handshake_out_ = std::move(out);
  stream->peer_ = std::move(peer);
  return stream;
}

std::shared_ptr<Stream> Stream::accepted(Hub& hub, Loop& loop, Fd fd, std::string remote, bool same_host) {
  return std::make_shared<Stream>(hub, loop, std::move(fd), std::move(remote), same_host,
                                  Handshake::accept(hub.secret, hub.id));
}

void Stream::start() {
  hub_.counters.num_handshakes.fetch_add(1, std::memory_order_relaxed);
  hub_.counters.num_streams.fetch_add(1, std::memory_order_relaxed);
  loop_.post([self = shared_from_this()] {
    self->started_ = self->last_tick_ = steady_clock::now();
    if (self->state_ == State::kClosed) return;
    self->watched_ = EPOLLIN | EPOLLOUT;
    self->loop_.add(self, self->fd_.get(), self->watched_);
  });
}

void Stream::wake() {
  if (wake_posted_.exchange(true, std::memory_order_relaxed)) return;
  loop_.post([self = shared_from_this()] {
    self->wake_posted_.store(false, std::memory_order_relaxed);
    if (!self->may_talk()) return;
    if (const Status sent = self->send(); !sent) self->shut(sent.error());
  });
}

void Stream::close(const Error& why) {
  loop_.post([self = shared_from_this(), why] { self->shut(why); });
}

void Stream::drop_revoked() {
  if (inbound_ && state_ == State::kOpen) inbound_->drop_revoked();
}

void Stream::watch(std::uint32_t epoll_events) {
  if (epoll_events == watched_) return;
  watched_ = epoll_events;
  loop_.change(this, fd_.get(), watched_);
}

void Stream::on_ready(std::uint32_t epoll_events) {
  Status status;
  if (state_ == State::kConnecting) {
    const int error = pending_error(fd_.get());
    if (error != 0)
      status = fail(Code::kDisconnected, fmt::format("connect to {}: {}", remote_, std::strerror(error)));
    state_ = State::kHandshake;
  }
  if (status && state_ == State::kHandshake) status = shake_hands();
  const bool talking = status && may_talk();
  if (talking && (epoll_events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) status = receive();
  if (talking && status) status = send();
  if (!talking && status && state_ == State::kOpen && (epoll_events & (EPOLLHUP | EPOLLERR)) != 0) {
    status = fail(Code::kDisconnected, "the other side closed the stream");
  }
  if (!status) shut(status.error());
}

Status Stream::shake_hands() {
  TPUSYNC_TRY(flush_handshake());
  while (!handshake_.open()) {
    const std::size_t wanted = handshake_.wanted_bytes();
    std::array<std::byte, wire::kHelloBytes> piece;
    const ssize_t got = ::recv(fd_.get(), piece.data(), wanted - handshake_in_.size(), MSG_DONTWAIT);
    if (got == 0)
      return fail(Code::kDisconnected, fmt::format("{} closed the stream in the handshake", remote_));
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return {};
    if (got < 0)
      return fail(Code::kDisconnected, fmt::format("receive from {}: {}", remote_, std::strerror(errno)));
    handshake_in_.insert(handshake_in_.end(), piece.begin(), piece.begin() + got);
    if (handshake_in_.size() < wanted) continue;
    TPUSYNC_TRY(handshake_.advance(handshake_in_, handshake_out_));
    handshake_in_.clear();
    TPUSYNC_TRY(flush_handshake());
  }
  // An acceptor's last proof must be on its way before the first frame.
  return handshake_out_.empty() ? enter_open() : Status();
}

Status Stream::flush_handshake() {
  while (!handshake_out_.empty()) {
    const ssize_t sent =
        ::send(fd_.get(), handshake_out_.data(), handshake_out_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno != EAGAIN && errno != EINTR) {
      return fail(Code::kDisconnected, fmt::format("send to {}: {}", remote_, std::strerror(errno)));
    }
    if (sent < 0) break;
    handshake_out_.erase(handshake_out_.begin(), handshake_out_.begin() + sent);
  }
  watch(handshake_out_.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT);
  return {};
}

Status Stream::enter_open() {
  const std::uint64_t generation = handshake_.hello().generation;
  inbound_.emplace(handshake_.receiving_key(), generation, hub_.options.checksum, *this);
  outbound_.emplace(handshake_.sending_key(), generation, hub_.options.checksum);
  last_sent_ = last_heard_ = last_progress_ = steady_clock::now();
  state_ = State::kOpen;
  hub_.counters.num_handshakes.fetch_sub(1, std::memory_order_relaxed);
  PeerRef peer = peer_;
  if (!peer) {
    base::Result<PeerRef> admitted = hub_.admit(handshake_.hello(), remote_, same_host_);
    if (!admitted) return tl::unexpected(std::move(admitted).error());
    peer = *std::move(admitted);
  }
  // A stream that may not join is no part of the peer, and does not take it along.
  const Status joined = peer->join(handshake_.hello().stream, shared_from_this(), handshake_.other());
  if (joined) peer_ = std::move(peer);
  if (joined && !may_talk()) watch(0);  // the last stream that joins wakes the others
  return joined;
}

bool Stream::may_talk() {
  if (state_ != State::kOpen || peer_is_open_) return state_ == State::kOpen;
  peer_is_open_ = peer_->state() == Peer::State::kOpen;
  if (peer_is_open_) last_heard_ = steady_clock::now();
  return peer_is_open_;
}

// Closing is the end of everything that this side reads or writes for the stream; then its frames resolve.
void Stream::shut(const Error& why) {
  if (state_ == State::kClosed) return;
  const State was = std::exchange(state_, State::kClosed);
  if (was == State::kOpen && outbound_->empty()) {
    wire::Bytes table;
    wire::Writer writer(table);
    wire::encode_table(wire::RefuseTable{0, why.code, why.message}, writer);
    load_control(wire::FrameType::kGoodbye, std::move(table));
    [[maybe_unused]] const auto last_word = outbound_->flush(fd_.get());
  }
  loop_.remove(this, fd_.get());
  inbound_.reset();
  fd_.reset();
  const Error told{why.code, fmt::format("peer {}: {}", remote_, why.message)};
  if (outbound_) {
    std::vector<Peer::Sent> lost(outbound_->unacknowledged().begin(), outbound_->unacknowledged().end());
    outbound_.reset();
    const Code code = why.code == Code::kCancelled ? Code::kCancelled : Code::kDisconnected;
    if (peer_) peer_->resolve(lost, fail(code, told.message));
  }
  if (was != State::kOpen && handshake_.role() == wire::Role::kAcceptor) hub_.report_refused(remote_, why);
  if (peer_) peer_->lose(told);
  // Last: once a stream is not counted any more, all that its end has caused can be seen.
  if (was != State::kOpen) hub_.counters.num_handshakes.fetch_sub(1, std::memory_order_relaxed);
  hub_.counters.num_streams.fetch_sub(1, std::memory_order_release);
}

// What ended the peer may have posted a close() too late for this loop to run it.
void Stream::on_stop() {
  shut({Code::kCancelled, "the endpoint was closed"});
}

Status Stream::check_time(Time now) {
  const auto& o = hub_.options;
  if (state_ != State::kOpen) {
    if (now - started_ < seconds(o.handshake_s)) return {};
    return fail(Code::kDeadline, fmt::format("no handshake within {} s", o.handshake_s));
  }
  if (!may_talk()) {
    if (now - started_ < seconds(o.handshake_s)) return {};
    return fail(Code::kDeadline, fmt::format("not all of its streams came within {} s", o.handshake_s));
  }
  if (now - last_heard_ > seconds(o.silence_s)) {
    return fail(Code::kDeadline, fmt::format("silent for {} s", o.silence_s));
  }
  if (!outbound_->unacknowledged().empty() && now - last_progress_ > seconds(o.progress_s)) {
    return fail(Code::kDeadline, fmt::format("no frame acknowledged for {} s", o.progress_s));
  }
  return {};
}

Time Stream::on_tick(Time now) {
  if (state_ == State::kClosed) return Time::max();
  // A process that was stopped or starved itself gives its peers as long as it was away.
  const auto away = now - std::exchange(last_tick_, now) - 5 * Loop::kTick;
  if (away > away.zero()) {
    started_ += away;
    last_heard_ += away;
    last_progress_ += away;
  }
  Status status = check_time(now);
  if (status && may_talk()) {
    if (now - last_sent_ > seconds(hub_.options.heartbeat_s) && outbound_->empty())
      load_control(wire::FrameType::kPing, {});
    if (handshake_.hello().stream == 0) peer_->tick(now);
    if (!outbound_->empty() || now >= retry_) status = send();
  }
  if (!status) {
    if (state_ == State::kOpen && status.error().code == Code::kDeadline)
      hub_.counters.peers_silent.fetch_add(1, std::memory_order_relaxed);
    shut(status.error());
  }
  return state_ == State::kClosed ? Time::max() : std::min(retry_, now + Loop::kTick);
}

}  // namespace tpusync::transport
