#include "tpusync/transport/loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace tpusync::transport {

using std::chrono::steady_clock;

base::Result<std::unique_ptr<Loop>> Loop::open(std::string name) {
  std::unique_ptr<Loop> loop(new Loop(std::move(name)));
  loop->epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  loop->wake_ = Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!loop->epoll_.valid() || !loop->wake_.valid()) return base::fail_errno("epoll", errno);
  epoll_event event{.events = EPOLLIN, .data = {.ptr = nullptr}};
  if (::epoll_ctl(loop->epoll_.get(), EPOLL_CTL_ADD, loop->wake_.get(), &event) != 0) {
    return base::fail_errno("epoll_ctl", errno);
  }
  loop->thread_ = std::jthread([raw = loop.get()] { raw->run(); });
  return loop;
}

Loop::~Loop() {
  stop();
  join();
}

void Loop::join() {
  if (thread_.joinable()) thread_.join();
}

void Loop::post(std::function<void()> job) {
  std::lock_guard lock(mutex_);
  posted_.push_back(std::move(job));
  if (std::exchange(woken_, true)) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written =
      ::write(wake_.get(), &one, sizeof one);  // cannot fail: it is not full
}

void Loop::stop() {
  post([this] { ended_ = true; });
}

void Loop::add(const std::shared_ptr<Handler>& handler, int fd, std::uint32_t epoll_events) {
  handlers_[handler.get()] = handler;
  epoll_event event{.events = epoll_events, .data = {.ptr = handler.get()}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  next_tick_ = std::min(next_tick_, steady_clock::now() + kTick);
}

void Loop::change(const Handler* handler, int fd, std::uint32_t epoll_events) {
  epoll_event event{.events = epoll_events, .data = {.ptr = const_cast<Handler*>(handler)}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Loop::remove(const Handler* handler, int fd) {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  const auto found = handlers_.find(handler);
  if (found == handlers_.end()) return;
  removed_.push_back(std::move(found->second));
  handlers_.erase(found);
}

void Loop::for_each(const std::function<void(Handler&)>& visit) {
  std::vector<std::shared_ptr<Handler>> all;
  for (const auto& [key, handler] : handlers_) all.push_back(handler);
  for (const auto& handler : all) visit(*handler);
}

void Loop::run() {
  ::pthread_setname_np(::pthread_self(), name_.substr(0, 15).c_str());
  while (!ended_) {
    wait();
    run_posted();
    tick();
    removed_.clear();
  }
  // Jobs that are posted from here on never run, so nobody may rely on one to be told of an end.
  for_each([](Handler& handler) { handler.on_stop(); });
  handlers_.clear();
  removed_.clear();
}

void Loop::wait() {
  std::array<epoll_event, 64> events;
  int timeout_ms = -1;
  if (next_tick_ != Time::max()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next_tick_ - steady_clock::now()).count();
    timeout_ms = static_cast<int>(std::clamp<long>(left, 0, 1000));
  }
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
  for (int i = 0; i < count; ++i) {
    auto* handler = static_cast<Handler*>(events[static_cast<std::size_t>(i)].data.ptr);
    if (handler == nullptr) {
      std::uint64_t ignored;
      [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &ignored, sizeof ignored);
      continue;
    }
    // One that was removed in this round is still alive in removed_, but no longer listed.
    if (handlers_.contains(handler)) handler->on_ready(events[static_cast<std::size_t>(i)].events);
  }
}

void Loop::run_posted() {
  std::vector<std::function<void()>> jobs;
  {
    std::lock_guard lock(mutex_);
    jobs.swap(posted_);
    woken_ = false;
  }
  for (auto& job : jobs) job();
}

void Loop::tick() {
  const Time now = steady_clock::now();
  if (now < next_tick_) return;
  next_tick_ = Time::max();
  for_each([&](Handler& handler) { next_tick_ = std::min(next_tick_, handler.on_tick(now)); });
}

}  // namespace tpusync::transport
