// Sockets: descriptors with an owner, addresses that are numbers, and the few calls that make them.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <utility>

#include "tpusync/base/error.h"

namespace tpusync::transport {

// Owns a file descriptor. Movable. Thread-compatible.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void reset() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

// A value: an IPv4, IPv6 or (same host) abstract Unix address.
class Address {
 public:
  // "1.2.3.4:5" or "[1::2]:5"; with `port_optional` also without the port. Names are not looked up: kInvalid.
  static base::Result<Address> parse(const std::string& text, bool port_optional = false);
  // What `fd` is bound to.
  static base::Result<Address> of(int fd);
  static Address remote_of(int fd);
  // The Unix address that stands for the endpoint which listens on this TCP address in this network
  // namespace.
  Address same_host() const;
  // As above, for an endpoint that listens on this port of every address.
  Address same_host_any() const;

  std::string text() const;
  bool is_loopback() const;
  // Whether it is an address of this host: a socket can be bound to it.
  bool is_here() const;
  int family() const { return storage_.any.ss_family; }
  const sockaddr* raw() const { return &storage_.base; }
  socklen_t size() const { return size_; }

 private:
  union {
    sockaddr base;
    sockaddr_in v4;
    sockaddr_in6 v6;
    sockaddr_un local;
    sockaddr_storage any;
  } storage_{.any = {}};
  socklen_t size_ = 0;
};

// All sockets are non-blocking and closed on exec; TCP ones send without delay.
base::Result<Fd> listen_on(const Address& address);
// A connection under way: writable once it is there. `source` may be null.
base::Result<Fd> dial(const Address& target, const Address* source);
// kNotFound when nobody waits, kExhausted when there is no descriptor left.
base::Result<Fd> accept_from(int listener);
// Who is on the other side of a TCP socket, as text.
std::string remote_of(int fd);
// The error that a connection under way ended with; 0 for none.
int pending_error(int fd);
// True once the other side has closed or shut down its end, whether or not bytes are left to read.
bool is_closed_by_peer(int fd);
// Process id of the other side of a Unix socket; 0 where it cannot be seen.
pid_t peer_process(int fd);

}  // namespace tpusync::transport
