#include "tpusync/testing/raw_peer.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>

#include "tpusync/wire/auth.h"

namespace tpusync::testing {

using transport::Handshake;

namespace {

constexpr int kPatienceMs = 5000;

bool ready(int fd, short events, int patience_ms = kPatienceMs) {
  pollfd look{.fd = fd, .events = events, .revents = 0};
  return ::poll(&look, 1, patience_ms) > 0;
}

}  // namespace

RawPeer::RawPeer(const std::string& address) {
  const auto target = transport::Address::parse(address);
  if (!target) std::abort();
  auto fd = transport::dial(*target, nullptr);
  if (!fd) std::abort();
  fd_ = *std::move(fd);
}

bool RawPeer::send(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    if (!ready(fd_.get(), POLLOUT)) return false;
    const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) return false;
    if (sent > 0) bytes = bytes.subspan(static_cast<std::size_t>(sent));
  }
  return true;
}

std::vector<std::byte> RawPeer::receive(std::size_t count) {
  std::vector<std::byte> out;
  while (out.size() < count && ready(fd_.get(), POLLIN)) {
    std::array<std::byte, 4096> piece;
    const ssize_t got = ::recv(fd_.get(), piece.data(), std::min(piece.size(), count - out.size()), 0);
    if (got <= 0) break;
    out.insert(out.end(), piece.begin(), piece.begin() + got);
  }
  return out;
}

bool RawPeer::wait_closed(std::chrono::seconds patience) {
  const auto until = std::chrono::steady_clock::now() + patience;
  while (std::chrono::steady_clock::now() < until) {
    if (!ready(fd_.get(), POLLIN, 20)) continue;
    std::array<std::byte, 4096> piece;
    const ssize_t got = ::recv(fd_.get(), piece.data(), piece.size(), 0);
    if (got == 0 || (got < 0 && errno != EAGAIN)) return true;
  }
  return false;
}

bool RawPeer::shake_hands(const transport::Secret& secret, wire::Hello hello) {
  wire::fill_random(hello.initiator);
  if (hello.generation == 0) hello.generation = wire::random_number();
  wire::Bytes out;
  handshake_ = Handshake::initiate(secret, hello, out);
  while (send(out)) {
    out.clear();
    if (handshake_->open()) return true;
    if (!handshake_->advance(receive(handshake_->wanted_bytes()), out)) return false;
  }
  return false;
}

wire::Bytes RawPeer::frame(wire::Head head, std::span<const std::byte> table,
                           std::span<const std::byte> payload) {
  head.sequence = next_sequence++;
  head.generation = handshake_->hello().generation;
  head.table_bytes = static_cast<std::uint32_t>(table.size());
  head.payload_bytes = static_cast<std::uint32_t>(payload.size());
  wire::Bytes out;
  wire::Writer writer(out);
  wire::encode_head(head, writer);
  writer.bytes(table);
  writer.bytes(wire::make_tag(handshake_->sending_key(), out));
  writer.bytes(payload);
  return out;
}

}  // namespace tpusync::testing
