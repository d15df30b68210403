// An in-order queue of copies between pools in ordinary memory.
//
//   submit_copy --plan, check--> queue --first in its stream--> pieces on the executor --last piece--> ticket
//   done
//        `--refused: a ticket that is done, with the reason
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/exec/executor.h"
#include "tpusync/exec/ticket.h"
#include "tpusync/layout/page_copy.h"

namespace tpusync::device {

// A buffer of the caller, who keeps it alive and unmoved until the ticket of the copy is done.
struct Buffer {
  std::byte* base = nullptr;
  std::uint64_t size_bytes = 0;
};

// One copy of token rows. The lists are read during submit_copy only; parts (K, V) in the same order on both
// sides.
struct PageCopy {
  std::span<const Buffer> dst_buffers;
  std::span<const Buffer> src_buffers;
  layout::PageGeometry dst;
  layout::PageGeometry src;
  std::span<const std::int64_t> dst_slots;
  std::span<const std::int64_t> src_slots;
  layout::LayerRange layers;
};

// A resource, made by HostDevice::open_stream. Thread-safe. A copy starts when all that was submitted to its
// stream before is done, and is shared out to the threads of the executor in pieces. The destructor cancels
// what waits and returns when no byte can move any more; it must not run on the executor, for example in an
// on_done callback.
class CopyStream {
 public:
  static constexpr std::size_t kQueueLimit = 65536;  // copies and markers that may wait
  static constexpr std::uint64_t kPieceBytes = std::uint64_t{1}
                                               << 20;  // a copy up to this size stays on one thread

  // `num_open` counts the streams of a device; `executor` must outlive the stream and have room for
  // executor.num_threads() jobs of it.
  CopyStream(std::string name, exec::Executor& executor, std::shared_ptr<std::atomic<int>> num_open);
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;
  ~CopyStream();

  // Plans and queues a copy; does not wait for it. The ticket fails before a byte moves with kInvalid for a
  // request that plan_page_copy or PageCopyPlan::check refuses or whose buffers are null, overlap or wrap
  // around, and with kBusy at kQueueLimit. cancel() stops it before it starts or between two pieces: then
  // some bytes have moved.
  exec::Ticket submit_copy(const PageCopy& copy);

  // A ticket that is done when all that was submitted before is done, whatever came of it.
  exec::Ticket submit_marker();

  // For tests: starts nothing for this long, counted from now; zero ends an earlier pause.
  void pause(std::chrono::nanoseconds duration);

  const std::string& name() const { return name_; }

 private:
  struct Job;

  exec::Ticket submit(std::shared_ptr<Job> job);
  std::shared_ptr<Job> next_or_rest();
  void advance();
  bool begin(const std::shared_ptr<Job>& job);
  bool leave(const std::shared_ptr<Job>& job);
  void resume_after_pause(std::stop_token stop);

  const std::string name_;
  exec::Executor& executor_;
  const std::shared_ptr<std::atomic<int>> num_open_;
  std::mutex mutex_;
  std::condition_variable_any changed_;  // rests_, closing_ or pause_until_ changed
  std::deque<std::shared_ptr<Job>> queue_;
  bool rests_ = true;  // false: somebody runs a job or looks for the next one
  bool closing_ = false;
  std::chrono::steady_clock::time_point pause_until_{};
  std::jthread pause_timer_;  // exists since the first pause()
};

}  // namespace tpusync::device
