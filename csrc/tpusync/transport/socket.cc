#include "tpusync/transport/socket.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>

namespace tpusync::transport {

using base::Code;
using base::fail;
using base::fail_errno;
using base::Result;

namespace {

constexpr int kBacklog = 256;
constexpr char kLocalPrefix[] = "tpusync/v1/";

struct HostPort {
  std::string host;
  std::uint16_t port = 0;
};

Result<HostPort> split(const std::string& text, bool port_optional) {
  const auto wrong = [&] {
    return fail(Code::kInvalid, fmt::format("address '{}': not of the form 1.2.3.4:5 or [1::2]:5", text));
  };
  HostPort out;
  std::size_t colon = text.rfind(':');
  if (!text.empty() && text.front() == '[') {
    const std::size_t end = text.find(']');
    if (end == std::string::npos) return wrong();
    out.host = text.substr(1, end - 1);
    colon = end + 1 < text.size() ? end + 1 : std::string::npos;
    if (colon != std::string::npos && text[colon] != ':') return wrong();
  } else if (port_optional && (colon == std::string::npos || text.find(':') != colon)) {
    out.host = text;
    return out;
  } else {
    out.host = text.substr(0, colon);
  }
  if (colon == std::string::npos) return port_optional ? Result<HostPort>(out) : wrong();
  const char* begin = text.data() + colon + 1;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(begin, end, out.port);
  if (parsed.ec != std::errc() || parsed.ptr != end) return wrong();
  return out;
}

}  // namespace

Result<Address> Address::parse(const std::string& text, bool port_optional) {
  Result<HostPort> parts = split(text, port_optional);
  if (!parts) return tl::unexpected(std::move(parts).error());
  Address address;
  if (::inet_pton(AF_INET, parts->host.c_str(), &address.storage_.v4.sin_addr) == 1) {
    address.storage_.v4.sin_family = AF_INET;
    address.storage_.v4.sin_port = htons(parts->port);
    address.size_ = sizeof(sockaddr_in);
    return address;
  }
  address = {};
  const std::size_t percent = parts->host.find('%');
  if (percent != std::string::npos) {
    address.storage_.v6.sin6_scope_id = ::if_nametoindex(parts->host.c_str() + percent + 1);
    if (address.storage_.v6.sin6_scope_id == 0)
      return fail(Code::kInvalid, fmt::format("address '{}': no such network interface", text));
    parts->host.resize(percent);
  }
  if (::inet_pton(AF_INET6, parts->host.c_str(), &address.storage_.v6.sin6_addr) == 1) {
    address.storage_.v6.sin6_family = AF_INET6;
    address.storage_.v6.sin6_port = htons(parts->port);
    address.size_ = sizeof(sockaddr_in6);
    return address;
  }
  return fail(Code::kInvalid, fmt::format("address '{}': not an IPv4 or IPv6 number", text));
}

Result<Address> Address::of(int fd) {
  Address address;
  address.size_ = sizeof address.storage_;
  if (::getsockname(fd, &address.storage_.base, &address.size_) != 0) return fail_errno("getsockname", errno);
  return address;
}

Address Address::remote_of(int fd) {
  Address address;
  address.size_ = sizeof address.storage_;
  if (::getpeername(fd, &address.storage_.base, &address.size_) != 0) address.size_ = 0;
  return address;
}

namespace {

void name_local(sockaddr_un& out, socklen_t& size, const std::string& text) {
  const std::string name = kLocalPrefix + text;
  out.sun_family = AF_UNIX;
  std::memcpy(out.sun_path + 1, name.data(), name.size());  // a leading zero byte: abstract, no file
  size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

}  // namespace

Address Address::same_host() const {
  Address out;
  name_local(out.storage_.local, out.size_, text());
  return out;
}

Address Address::same_host_any() const {
  Address any = *this;
  if (family() == AF_INET) any.storage_.v4.sin_addr.s_addr = htonl(INADDR_ANY);
  if (family() == AF_INET6) any.storage_.v6.sin6_addr = in6addr_any;
  return any.same_host();
}

std::string Address::text() const {
  char host[INET6_ADDRSTRLEN] = "?";
  if (family() == AF_INET) {
    ::inet_ntop(AF_INET, &storage_.v4.sin_addr, host, sizeof host);
    return fmt::format("{}:{}", host, ntohs(storage_.v4.sin_port));
  }
  if (family() == AF_INET6) {
    ::inet_ntop(AF_INET6, &storage_.v6.sin6_addr, host, sizeof host);
    return fmt::format("[{}]:{}", host, ntohs(storage_.v6.sin6_port));
  }
  const std::size_t start = offsetof(sockaddr_un, sun_path) + 1;
  if (family() == AF_UNIX && size_ > start)
    return fmt::format("@{}", std::string(storage_.local.sun_path + 1, size_ - start));
  return "@";
}

bool Address::is_loopback() const {
  if (family() == AF_INET) return (ntohl(storage_.v4.sin_addr.s_addr) >> 24) == 127;
  if (family() == AF_INET6) {
    const in6_addr& a = storage_.v6.sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(&a) || (IN6_IS_ADDR_V4MAPPED(&a) && a.s6_addr[12] == 127);
  }
  return family() == AF_UNIX;
}

bool Address::is_here() const {
  if (family() == AF_UNIX || is_loopback()) return true;
  Address probe = *this;
  if (family() == AF_INET) probe.storage_.v4.sin_port = 0;
  if (family() == AF_INET6) probe.storage_.v6.sin6_port = 0;
  const Fd fd(::socket(family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return fd.valid() && ::bind(fd.get(), probe.raw(), probe.size()) == 0;
}

namespace {

Result<Fd> make_socket(int family) {
  Fd fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return fail_errno("socket", errno);
  return fd;
}

void send_without_delay(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // a Unix socket refuses, and needs it not
}

}  // namespace

Result<Fd> listen_on(const Address& address) {
  Result<Fd> fd = make_socket(address.family());
  if (!fd) return fd;
  const int on = 1;
  if (address.family() != AF_UNIX) ::setsockopt(fd->get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.family() == AF_INET6) ::setsockopt(fd->get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  if (::bind(fd->get(), address.raw(), address.size()) != 0)
    return fail_errno("bind " + address.text(), errno);
  if (::listen(fd->get(), kBacklog) != 0) return fail_errno("listen " + address.text(), errno);
  return fd;
}

Result<Fd> dial(const Address& target, const Address* source) {
  Result<Fd> fd = make_socket(target.family());
  if (!fd) return fd;
  send_without_delay(fd->get());
  if (source != nullptr && ::bind(fd->get(), source->raw(), source->size()) != 0) {
    return fail_errno("bind " + source->text(), errno);
  }
  if (::connect(fd->get(), target.raw(), target.size()) != 0 && errno != EINPROGRESS) {
    const int error = errno;
    return fail(Code::kDisconnected, fmt::format("connect to {}: {}", target.text(), std::strerror(error)));
  }
  return fd;
}

Result<Fd> accept_from(int listener) {
  Fd fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!fd.valid()) {
    const bool none_left = errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS;
    return fail(none_left ? Code::kExhausted : Code::kNotFound, std::strerror(errno));
  }
  send_without_delay(fd.get());
  return fd;
}

std::string remote_of(int fd) {
  const Address remote = Address::remote_of(fd);
  if (remote.family() != AF_UNIX) return remote.text();
  return fmt::format("process {}", peer_process(fd));
}

int pending_error(int fd) {
  int error = 0;
  socklen_t size = sizeof error;
  return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

bool is_closed_by_peer(int fd) {
  pollfd look{.fd = fd, .events = POLLRDHUP, .revents = 0};
  return ::poll(&look, 1, 0) > 0 && (look.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

pid_t peer_process(int fd) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 ? peer.pid : 0;
}

}  // namespace tpusync::transport
