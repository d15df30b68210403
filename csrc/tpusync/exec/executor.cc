#include "tpusync/exec/executor.h"

#include <fmt/format.h>
#include <pthread.h>

namespace tpusync::exec {

using base::Code;

namespace {
constexpr int kNumThreadsMax = 256;
constexpr std::size_t kNameLengthMax = 12;
}  // namespace

base::Result<std::unique_ptr<Executor>> Executor::open(Options options) {
  if (options.name.empty() || options.name.size() > kNameLengthMax) {
    return base::fail(Code::kInvalid,
                      fmt::format("executor name '{}': 1 to {} characters", options.name, kNameLengthMax));
  }
  if (options.num_threads < 1 || options.num_threads > kNumThreadsMax) {
    return base::fail(Code::kInvalid, fmt::format("executor {}: {} threads, allowed are 1 to {}",
                                                  options.name, options.num_threads, kNumThreadsMax));
  }
  if (options.queue_limit < 1) {
    return base::fail(Code::kInvalid, fmt::format("executor {}: queue_limit 0, at least 1", options.name));
  }
  return std::unique_ptr<Executor>(new Executor(std::move(options)));
}

Executor::Executor(Options options) : options_(std::move(options)) {
  threads_.reserve(options_.num_threads);
  for (int i = 0; i < options_.num_threads; ++i) threads_.emplace_back([this, i] { run(i); });
}

Executor::~Executor() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  wake_.notify_all();
  threads_.clear();
}

base::Status Executor::submit(std::function<void()> job) {
  {
    std::lock_guard lock(mutex_);
    if (closing_) return base::fail(Code::kCancelled, fmt::format("executor {} is closing", options_.name));
    if (queue_.size() >= options_.queue_limit) {
      return base::fail(Code::kBusy,
                        fmt::format("executor {}: {} jobs wait, the limit", options_.name, queue_.size()));
    }
    queue_.push_back(std::move(job));
  }
  wake_.notify_one();
  return {};
}

std::size_t Executor::num_queued() const {
  std::lock_guard lock(mutex_);
  return queue_.size();
}

void Executor::run(int index) {
  pthread_setname_np(pthread_self(), fmt::format("{}-{}", options_.name, index).c_str());
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::function<void()> job = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    job();
    job = nullptr;
    lock.lock();
  }
}

}  // namespace tpusync::exec
