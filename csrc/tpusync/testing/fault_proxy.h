// A network that misbehaves on request: forwards TCP connections of this host and cuts, stalls, delays or
// damages them at a byte that the test names.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tpusync/transport/socket.h"

namespace tpusync::testing {

// What happens to one direction of a connection.
struct Faults {
  std::optional<std::uint64_t> cut_after = std::nullopt;  // bytes; then both directions are reset
  std::optional<std::uint64_t> flip_at = std::nullopt;    // offset of a byte whose lowest bit is turned
  std::chrono::milliseconds delay{0};                     // before each piece is passed on
};

// A resource. Thread-safe.
class FaultProxy {
 public:
  // Aborts the test program when the sockets cannot be made.
  explicit FaultProxy(const std::string& target);
  FaultProxy(const FaultProxy&) = delete;
  FaultProxy& operator=(const FaultProxy&) = delete;
  ~FaultProxy();

  const std::string& address() const { return address_; }

  // For connections that are opened from now on; `forth` is the direction of who connects.
  void set(Faults forth, Faults back);
  // While true nothing is passed on, and nobody is told.
  void partition(bool on) { partitioned_.store(on); }
  // Resets what is open.
  void reset_all();
  std::uint64_t bytes_forth() const { return bytes_forth_.load(); }
  std::uint64_t bytes_back() const { return bytes_back_.load(); }

 private:
  struct Link {
    transport::Fd client;
    transport::Fd server;
    std::atomic<bool> cut{false};
  };
  void accept_all();
  void pump(std::shared_ptr<Link> link, bool is_forth, Faults faults);

  const std::string target_;
  std::string address_;
  transport::Fd listener_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> partitioned_{false};
  std::atomic<std::uint64_t> bytes_forth_{0};
  std::atomic<std::uint64_t> bytes_back_{0};
  std::mutex mutex_;
  Faults forth_;
  Faults back_;
  std::vector<std::weak_ptr<Link>> links_;  // a link ends with its two pumps, by a reset
  std::vector<std::thread> pumps_;
  std::thread acceptor_;
};

}  // namespace tpusync::testing
