// A fixed set of named threads that run jobs from one bounded queue, first come first served.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tpusync/base/error.h"

namespace tpusync::exec {

// A resource. Thread-safe. The destructor runs the jobs that are queued, then joins: a job always runs
// exactly once if submit() accepted it, so that whoever waits for it is always answered.
class Executor {
 public:
  struct Options {
    std::string name;                // at most 12 characters: threads are called name-0, name-1, ...
    int num_threads = 1;             // 1 to 256
    std::size_t queue_limit = 4096;  // jobs that may wait
  };

  // kInvalid when an option is out of its range.
  static base::Result<std::unique_ptr<Executor>> open(Options options);

  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;
  ~Executor();

  // kBusy when queue_limit jobs wait; kCancelled while the executor closes.
  base::Status submit(std::function<void()> job);

  int num_threads() const { return options_.num_threads; }
  std::size_t num_queued() const;

 private:
  explicit Executor(Options options);
  void run(int index);

  const Options options_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  bool closing_ = false;
  std::vector<std::jthread> threads_;
};

}  // namespace tpusync::exec
