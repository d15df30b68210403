#include "tpusync/testing/fault_proxy.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>

namespace tpusync::testing {

using transport::Address;
using transport::Fd;

namespace {

constexpr int kPollMs = 5;

// Waits a little; true when the descriptor is ready.
bool ready(int fd, short events) {
  pollfd look{.fd = fd, .events = events, .revents = 0};
  return ::poll(&look, 1, kPollMs) > 0;
}

// Closing it from now on is a reset.
void will_reset(const Fd& fd) {
  const linger at_once{.l_onoff = 1, .l_linger = 0};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
}

template <typename T>
T need(base::Result<T> result) {
  if (!result) std::abort();
  return *std::move(result);
}

}  // namespace

FaultProxy::FaultProxy(const std::string& target) : target_(target) {
  listener_ = need(transport::listen_on(need(Address::parse("127.0.0.1:0"))));
  address_ = need(Address::of(listener_.get())).text();
  acceptor_ = std::thread([this] { accept_all(); });
}

FaultProxy::~FaultProxy() {
  stopping_.store(true);
  acceptor_.join();
  for (std::thread& pump : pumps_) pump.join();
}

void FaultProxy::set(Faults forth, Faults back) {
  std::lock_guard lock(mutex_);
  forth_ = forth;
  back_ = back;
}

void FaultProxy::reset_all() {
  std::lock_guard lock(mutex_);
  for (const auto& held : links_) {
    if (const auto link = held.lock()) link->cut.store(true);
  }
}

void FaultProxy::accept_all() {
  while (!stopping_.load()) {
    if (!ready(listener_.get(), POLLIN)) continue;
    auto link = std::make_shared<Link>();
    base::Result<Fd> client = transport::accept_from(listener_.get());
    base::Result<Fd> server = transport::dial(need(Address::parse(target_)), nullptr);
    if (!client || !server) continue;
    link->client = *std::move(client);
    link->server = *std::move(server);
    std::lock_guard lock(mutex_);
    links_.push_back(link);
    pumps_.emplace_back([this, link, faults = forth_] { pump(link, true, faults); });
    pumps_.emplace_back([this, link, faults = back_] { pump(link, false, faults); });
  }
}

void FaultProxy::pump(std::shared_ptr<Link> link, bool is_forth, Faults faults) {
  const int from = (is_forth ? link->client : link->server).get();
  const int to = (is_forth ? link->server : link->client).get();
  std::atomic<std::uint64_t>& counted = is_forth ? bytes_forth_ : bytes_back_;
  std::array<char, 65536> buffer;
  std::uint64_t passed = 0;
  while (!stopping_.load() && !link->cut.load()) {
    if (partitioned_.load() || !ready(from, POLLIN)) continue;
    std::size_t room = buffer.size();
    if (faults.cut_after) room = std::min<std::uint64_t>(room, *faults.cut_after - passed);
    const ssize_t got = room == 0 ? 0 : ::recv(from, buffer.data(), room, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) continue;
    if (got <= 0) break;
    if (faults.delay.count() > 0) std::this_thread::sleep_for(faults.delay);
    const auto count = static_cast<std::uint64_t>(got);
    if (faults.flip_at && *faults.flip_at >= passed && *faults.flip_at < passed + count) {
      buffer[*faults.flip_at - passed] ^= 1;
    }
    passed += count;
    counted += count;
    for (std::uint64_t sent = 0; sent < count && !stopping_.load() && !link->cut.load();) {
      if (!ready(to, POLLOUT)) continue;
      const ssize_t put = ::send(to, buffer.data() + sent, count - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (put < 0 && errno != EAGAIN) link->cut.store(true);
      if (put > 0) sent += static_cast<std::uint64_t>(put);
    }
    if (faults.cut_after && passed >= *faults.cut_after) break;
  }
  link->cut.store(true);
  will_reset(link->client);
  will_reset(link->server);
}

}  // namespace tpusync::testing
