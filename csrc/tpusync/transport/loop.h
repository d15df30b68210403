// A thread that waits for sockets and runs what they are ready for.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/transport/socket.h"

namespace tpusync::transport {

using Time = std::chrono::steady_clock::time_point;

// Something with a socket. All methods run on the thread of its loop.
class Handler {
 public:
  virtual ~Handler() = default;
  virtual void on_ready(std::uint32_t epoll_events) = 0;
  // After the sockets that were ready: time alone shows no silence as long as there is something to read.
  // Answers when it wants to be ticked next; max() for never.
  virtual Time on_tick(Time now) = 0;
  // Last of all: the loop ends, and whoever still waits for this handler must be told.
  virtual void on_stop() = 0;
};

// A resource. post() is thread-safe; the rest is confined to the loop's thread.
class Loop {
 public:
  static constexpr auto kTick = std::chrono::milliseconds(20);

  static base::Result<std::unique_ptr<Loop>> open(std::string name);
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;
  ~Loop();  // runs what was posted, drops the handlers, joins

  // Runs `job` soon. Dropped without running only if the loop has ended.
  void post(std::function<void()> job);
  // Ends the thread after what was posted before. Handlers are destroyed on it.
  void stop();
  void join();

  void add(const std::shared_ptr<Handler>& handler, int fd, std::uint32_t epoll_events);
  void change(const Handler* handler, int fd, std::uint32_t epoll_events);
  // The handler stays alive until the current round is over.
  void remove(const Handler* handler, int fd);
  // Ticks this handler (again) not later than `when`.
  void tick_by(Time when) { next_tick_ = std::min(next_tick_, when); }
  void for_each(const std::function<void(Handler&)>& visit);

 private:
  explicit Loop(std::string name) : name_(std::move(name)) {}
  void run();
  void wait();
  void run_posted();
  void tick();

  const std::string name_;
  Fd epoll_;
  Fd wake_;
  std::mutex mutex_;
  std::vector<std::function<void()>> posted_;
  bool woken_ = false;
  bool ended_ = false;  // of the thread's own
  std::unordered_map<const Handler*, std::shared_ptr<Handler>> handlers_;
  std::vector<std::shared_ptr<Handler>> removed_;
  Time next_tick_ = Time::max();
  std::jthread thread_;
};

}  // namespace tpusync::transport
