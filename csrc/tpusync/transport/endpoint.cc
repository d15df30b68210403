#include "tpusync/transport/endpoint.h"

#include <fmt/format.h>
#include <sys/epoll.h>

#include <algorithm>

#include "tpusync/base/log.h"
#include "tpusync/transport/listener.h"
#include "tpusync/transport/stream.h"

namespace tpusync::transport {

using base::Code;
using base::Error;
using base::fail;
using base::Result;
using base::Status;

namespace {

constexpr std::size_t kRefusedHostsMax = 256;

Result<std::vector<Address>> parse_all(const std::vector<std::string>& texts, bool port_optional) {
  std::vector<Address> out;
  for (const std::string& text : texts) {
    const Result<Address> address = Address::parse(text, port_optional);
    if (!address) return tl::unexpected(address.error());
    out.push_back(*address);
  }
  return out;
}

}  // namespace

Result<std::unique_ptr<Endpoint>> Endpoint::open(Options options) {
  TPUSYNC_TRY(validate(options));
  Secret secret;
  if (!options.secret_file.empty()) {
    Result<Secret> read = read_secret(options.secret_file);
    if (!read) return tl::unexpected(std::move(read).error());
    secret = *std::move(read);
  }
  std::unique_ptr<Endpoint> endpoint(new Endpoint(std::move(options), std::move(secret)));
  Result<std::vector<Address>> sources = parse_all(endpoint->options.source, true);
  if (!sources) return tl::unexpected(std::move(sources).error());
  endpoint->sources_ = *std::move(sources);
  for (int i = 0; i < endpoint->options.num_io_threads; ++i) {
    Result<std::unique_ptr<Loop>> loop = Loop::open(fmt::format("tpusync-io-{}", i));
    if (!loop) return tl::unexpected(std::move(loop).error());
    endpoint->loops_.push_back(*std::move(loop));
  }
  TPUSYNC_TRY(endpoint->listen());
  return endpoint;
}

Endpoint::~Endpoint() {
  close();
}

Status Endpoint::listen() {
  for (const std::string& text : options.bind) TPUSYNC_TRY(listen(text));
  return {};
}

Status Endpoint::listen(const std::string& text) {
  const Result<Address> wanted = Address::parse(text);
  if (!wanted) return tl::unexpected(wanted.error());
  TPUSYNC_TRY(check_loopback(*wanted));
  Result<Fd> fd = listen_on(*wanted);
  if (!fd) return tl::unexpected(std::move(fd).error());
  const Result<Address> bound = Address::of(fd->get());
  if (!bound) return tl::unexpected(bound.error());
  addresses_.push_back(bound->text());
  const auto watch = [this](Fd listener, bool same_host) {
    Loop& loop = *loops_.front();
    auto handler = std::make_shared<Listener>(static_cast<Hub&>(*this), loop, std::move(listener), same_host,
                                              [this]() -> Loop& { return next_loop(); });
    loop.post([&loop, handler] { loop.add(handler, handler->fd(), EPOLLIN); });
  };
  watch(*std::move(fd), false);
  if (!options.same_host) return {};
  Result<Fd> local = listen_on(bound->same_host());
  if (local) watch(*std::move(local), true);
  if (!local)
    base::log(base::LogLevel::kWarning,
              fmt::format("peers on this host will use TCP: {}", local.error().message));
  return {};
}

Status Endpoint::check_loopback(const Address& address) const {
  if (!secret.empty() || options.allow_unauthenticated || address.is_loopback()) return {};
  return fail(Code::kInvalid,
              fmt::format("secret_file: needed for {}, which is not loopback", address.text()));
}

Loop& Endpoint::next_loop() {
  return *loops_[next_loop_.fetch_add(1, std::memory_order_relaxed) % loops_.size()];
}

exec::Ticket Endpoint::revoke_grant(GrantId grant) {
  const exec::Ticket gone = grants.revoke(grant);
  if (gone.done()) return gone;
  for (const auto& loop : loops_) {
    loop->post([raw = loop.get()] {
      raw->for_each([](Handler& handler) {
        if (auto* stream = dynamic_cast<Stream*>(&handler)) stream->drop_revoked();
      });
    });
  }
  return gone;
}

Result<PeerRef> Endpoint::new_peer(const wire::Hello& hello, const std::string& remote, bool same_host) {
  if (closed_) return fail(Code::kCancelled, "the endpoint is closed");
  if (peers_.size() >= options.num_peers_max)
    return fail(Code::kBusy, fmt::format("num_peers_max: {} are there", peers_.size()));
  auto peer = std::make_shared<Peer>(static_cast<Hub&>(*this), ++last_peer_, hello, remote, same_host);
  peers_[peer->id()] = peer;
  return peer;
}

Result<PeerRef> Endpoint::admit(const wire::Hello& hello, const std::string& remote, bool same_host) {
  std::lock_guard lock(mutex_);
  PeerRef& session = sessions_[{hello.initiator, hello.generation}];
  if (!session) {
    Result<PeerRef> peer = new_peer(hello, remote, same_host);
    if (!peer) {
      sessions_.erase({hello.initiator, hello.generation});
      return peer;
    }
    session = *peer;
  }
  return session;
}

Result<PeerId> Endpoint::connect(const std::vector<std::string>& addresses, exec::Deadline deadline) {
  if (addresses.empty()) return fail(Code::kInvalid, "connect: no address");
  const Result<std::vector<Address>> targets = parse_all(addresses, false);
  if (!targets) return tl::unexpected(targets.error());
  for (const Address& target : *targets) TPUSYNC_TRY(check_loopback(target));
  if (!deadline) {
    deadline =
        std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                               std::chrono::duration<double>(options.handshake_s));
  }
  if (options.same_host && targets->front().is_here()) {
    for (const Address& local : {targets->front().same_host(), targets->front().same_host_any()}) {
      if (Result<PeerId> peer = connect_once({local}, 1, true, deadline)) return peer;
    }
  }
  return connect_once(*targets, options.num_streams, false, deadline);
}

Result<PeerId> Endpoint::connect_once(const std::vector<Address>& targets, int num_streams, bool same_host,
                                      exec::Deadline deadline) {
  wire::Hello hello;
  hello.initiator = Hub::id;
  hello.generation = wire::random_number();
  hello.num_streams = static_cast<std::uint16_t>(num_streams);
  Result<PeerRef> made = fail(Code::kBusy, "");
  {
    std::lock_guard lock(mutex_);
    made = new_peer(hello, targets.front().text(), same_host);
  }
  if (!made) return tl::unexpected(made.error());
  const PeerRef& peer = *made;
  for (; hello.stream < num_streams; ++hello.stream) {
    const Address* source =
        same_host || sources_.empty() ? nullptr : &sources_[hello.stream % sources_.size()];
    Result<Fd> fd = dial(targets[hello.stream % targets.size()], source);
    if (!fd) {
      peer->lose(fd.error());
      return tl::unexpected(fd.error());
    }
    const auto stream = Stream::dialled(static_cast<Hub&>(*this), next_loop(), *std::move(fd), peer, hello);
    peer->attach(stream);
    stream->start();
  }
  if (!peer->opened().wait(deadline))
    peer->lose({Code::kDeadline, fmt::format("peer {}: no handshake in time", peer->remote())});
  // lose() finishes the ticket on its way, here or on the thread that came first.
  peer->opened().wait();
  if (const Status opened = peer->opened().status(); !opened) return tl::unexpected(opened.error());
  return peer->id();
}

Result<PeerRef> Endpoint::find(PeerId peer) const {
  std::lock_guard lock(mutex_);
  const auto found = peers_.find(peer);
  if (found == peers_.end())
    return fail(Code::kDisconnected, fmt::format("peer {} is lost or was never there", peer));
  return found->second;
}

Status Endpoint::disconnect(PeerId id) {
  const Result<PeerRef> peer = find(id);
  if (!peer) return tl::unexpected(peer.error());
  (*peer)->lose({Code::kCancelled, "disconnected by the endpoint"});
  return {};
}

Result<exec::Ticket> Endpoint::submit_write(PeerId to, GrantId grant, std::vector<Piece> pieces,
                                            exec::Deadline deadline) {
  const Result<PeerRef> peer = find(to);
  if (!peer) return tl::unexpected(peer.error());
  auto transfer = std::make_shared<Transfer>();
  transfer->grant = grant;
  transfer->deadline = deadline;
  transfer->pieces = std::move(pieces);
  RegionRef last;
  for (const Piece& piece : transfer->pieces) {
    const bool same = last && piece.from >= last->base && piece.length <= last->length &&
                      static_cast<std::size_t>(piece.from - last->base) <= last->length - piece.length;
    if (!same) last = regions.containing(piece.from, piece.length);
    if (!last || piece.length == 0) {
      return fail(Code::kInvalid, fmt::format("{} bytes at {:#x} are not in one registered region",
                                              piece.length, reinterpret_cast<std::uintptr_t>(piece.from)));
    }
    if (piece.offset + piece.length < piece.offset) {
      return fail(Code::kInvalid,
                  fmt::format("{} bytes at offset {} are no range", piece.length, piece.offset));
    }
    transfer->sources.push_back(last);
    transfer->length_bytes += piece.length;
  }
  if (transfer->pieces.empty()) return exec::Ticket();
  merge_pieces(*transfer);
  const exec::Ticket ticket = transfer->ticket.ticket();
  TPUSYNC_TRY((*peer)->submit(std::move(transfer)));
  return ticket;
}

Result<exec::Ticket> Endpoint::submit_message(PeerId to, std::span<const std::byte> message) {
  if (message.empty() || message.size() > wire::kMessageBytesMax) {
    return fail(Code::kInvalid, fmt::format("a message of {} bytes, allowed are 1 to {}", message.size(),
                                            wire::kMessageBytesMax));
  }
  const Result<PeerRef> peer = find(to);
  if (!peer) return tl::unexpected(peer.error());
  auto transfer = std::make_shared<Transfer>();
  transfer->kind = Transfer::Kind::kMessage;
  transfer->message.assign(message.begin(), message.end());
  transfer->length_bytes = message.size();
  const exec::Ticket ticket = transfer->ticket.ticket();
  TPUSYNC_TRY((*peer)->submit(std::move(transfer)));
  return ticket;
}

void Endpoint::deliver_lost(PeerId id, const Error& why, bool was_open) {
  {
    std::lock_guard lock(mutex_);
    const auto found = peers_.find(id);
    if (found == peers_.end()) return;
    sessions_.erase({found->second->initiator(), found->second->generation()});
    peers_.erase(found);
  }
  if (!was_open) return;
  counters.peers_lost.fetch_add(1, std::memory_order_relaxed);
  inbox_.push_lost(id, why.message);
}

void Endpoint::report_refused(const std::string& remote, const Error& why) {
  counters.handshakes_refused.fetch_add(1, std::memory_order_relaxed);
  const std::string host = remote.substr(0, remote.rfind(':'));
  {
    std::lock_guard lock(mutex_);
    if (refused_hosts_.size() >= kRefusedHostsMax || !refused_hosts_.insert(host).second) return;
  }
  base::log(
      base::LogLevel::kWarning,
      fmt::format("a connection from {} was refused, said once for this host: {}", remote, why.message));
}

std::vector<PeerInfo> Endpoint::peers() const {
  std::lock_guard lock(mutex_);
  std::vector<PeerInfo> out;
  for (const auto& [id, peer] : peers_) {
    if (peer->state() != Peer::State::kOpen) continue;
    out.push_back({id, peer->endpoint(), peer->remote(), peer->same_host(), peer->queued_bytes()});
  }
  return out;
}

std::vector<metrics::Sample> Endpoint::samples() const {
  const auto value = [](const std::atomic<std::uint64_t>& counter) {
    return counter.load(std::memory_order_acquire);
  };
  std::size_t num_peers = 0;
  {
    std::lock_guard lock(mutex_);
    num_peers = peers_.size();
  }
  return {{"sent_bytes", value(counters.sent_bytes)},
          {"landed_bytes", value(counters.landed_bytes)},
          {"fetched_bytes", value(counters.fetched_bytes)},
          {"frames_sent", value(counters.frames_sent)},
          {"frames_received", value(counters.frames_received)},
          {"frames_refused", value(counters.frames_refused)},
          {"frames_corrupt", value(counters.frames_corrupt)},
          {"handshakes_refused", value(counters.handshakes_refused)},
          {"peers_lost", value(counters.peers_lost)},
          {"peers_silent", value(counters.peers_silent)},
          {"num_handshakes", value(counters.num_handshakes)},
          {"num_streams", value(counters.num_streams)},
          {"num_peers", std::uint64_t{num_peers}},
          {"num_grants", std::uint64_t{grants.size()}}};
}

void Endpoint::close() {
  std::lock_guard closing(close_mutex_);  // whoever comes second waits too
  std::vector<PeerRef> open;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    for (const auto& [id, peer] : peers_) open.push_back(peer);
  }
  for (const PeerRef& peer : open) peer->lose({Code::kCancelled, "the endpoint was closed"});
  for (const auto& loop : loops_) loop->stop();
  for (const auto& loop : loops_) loop->join();
  inbox_.close();
}

}  // namespace tpusync::transport
