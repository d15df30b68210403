#include "tpusync/flash/io_engine.h"

#ifdef TPUSYNC_URING

#include <fmt/format.h>
#include <liburing.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <mutex>
#include <vector>

namespace tpusync::flash {

using base::Code;
using base::Result;
using base::Status;

namespace {

// Transfers one worker keeps in flight. More gained nothing for pages of 64 KiB and up.
constexpr unsigned kDepth = 16;

struct Ring {
  io_uring ring{};
  bool open = false;
  ~Ring() {
    if (open) io_uring_queue_exit(&ring);
  }
};

Result<std::unique_ptr<Ring>> open_ring() {
  auto ring = std::make_unique<Ring>();
  const int answer = io_uring_queue_init(kDepth, &ring->ring, 0);
  if (answer < 0) {
    return base::fail(Code::kUnsupported,
                      fmt::format("io_uring is not available: {}", std::strerror(-answer)));
  }
  ring->open = true;
  return ring;
}

// One transfer under way; `left` shrinks when the kernel moves only a part.
struct Flight {
  std::size_t index = 0;
  Io io;
  std::vector<iovec> left;
};

// Works through one job on one ring. Confined to the calling thread.
class Run {
 public:
  Run(Ring& ring, os::File& file, IoJob& job) : ring_(ring.ring), file_(file), job_(job), flights_(kDepth) {
    for (Flight& flight : flights_) idle_.push_back(&flight);
  }

  // False: the ring must not be used again.
  bool run() {
    std::size_t next = 0;
    while (next < job_.size() || num_in_flight() > 0) {
      while (next < job_.size() && !idle_.empty()) begin(next++);
      if (num_in_flight() > 0) reap();
    }
    return !broken_;
  }

 private:
  std::size_t num_in_flight() const { return flights_.size() - idle_.size(); }

  void begin(std::size_t index) {
    Flight& flight = *idle_.back();
    flight.index = index;
    if (!job_.prepare(index, flight.io)) return;
    idle_.pop_back();
    flight.left.assign(flight.io.pieces.begin(), flight.io.pieces.end());
    queue(flight);
    // At once: the disk works while the next page's checksum is computed.
    submit();
    while (io_uring_cq_ready(&ring_) > 0) reap();
  }

  void queue(Flight& flight) {
    io_uring_sqe* const sqe = io_uring_get_sqe(&ring_);  // never null: as many entries as flights
    const auto num_pieces = static_cast<unsigned>(std::min<std::size_t>(flight.left.size(), IOV_MAX));
    if (flight.io.is_write) {
      io_uring_prep_writev(sqe, file_.descriptor(), flight.left.data(), num_pieces, flight.io.offset);
    } else {
      io_uring_prep_readv(sqe, file_.descriptor(), flight.left.data(), num_pieces, flight.io.offset);
    }
    io_uring_sqe_set_data(sqe, &flight);
    unsubmitted_.push_back(&flight);
  }

  void submit() {
    while (!unsubmitted_.empty()) {
      const int answer = io_uring_submit(&ring_);
      if (answer > 0) {
        unsubmitted_.erase(unsubmitted_.begin(), unsubmitted_.begin() + answer);
      } else if (answer == -EAGAIN || answer == -EBUSY) {
        if (num_in_flight() > unsubmitted_.size()) return;  // what is reaped makes room
      } else if (answer < 0 && answer != -EINTR) {
        // What the kernel has not taken will never move: answer for it and give the ring up afterwards.
        broken_ = true;
        for (Flight* flight : std::exchange(unsubmitted_, {}))
          end(*flight, base::fail_errno("io_uring", -answer));
      }
    }
  }

  void reap() {
    submit();
    if (num_in_flight() == 0) return;
    io_uring_cqe* cqe = nullptr;
    int answer = -EINTR;
    while (answer == -EINTR || answer == -EAGAIN) answer = io_uring_wait_cqe(&ring_, &cqe);
    if (answer < 0) return;
    Flight& flight = *static_cast<Flight*>(io_uring_cqe_get_data(cqe));
    const int result = cqe->res;
    io_uring_cqe_seen(&ring_, cqe);
    if (result == -EINTR || result == -EAGAIN) {
      queue(flight);
    } else if (result < 0) {
      end(flight, base::fail_errno(flight.io.is_write ? "write to the slot file" : "read from the slot file",
                                   -result));
    } else {
      advance(flight, static_cast<std::size_t>(result));
    }
  }

  void advance(Flight& flight, std::size_t num_bytes) {
    flight.io.offset += num_bytes;
    const bool none = num_bytes == 0;
    std::size_t num_done = 0;
    while (num_done < flight.left.size() && num_bytes >= flight.left[num_done].iov_len) {
      num_bytes -= flight.left[num_done++].iov_len;
    }
    flight.left.erase(flight.left.begin(), flight.left.begin() + static_cast<std::ptrdiff_t>(num_done));
    if (flight.left.empty()) return end(flight, {});
    if (none) return end(flight, base::fail(Code::kIo, "the slot file ends within a slot"));
    flight.left.front().iov_base = static_cast<std::byte*>(flight.left.front().iov_base) + num_bytes;
    flight.left.front().iov_len -= num_bytes;
    queue(flight);
  }

  void end(Flight& flight, Status status) {
    idle_.push_back(&flight);
    job_.complete(flight.index, std::move(status));
  }

  io_uring& ring_;
  os::File& file_;
  IoJob& job_;
  std::vector<Flight> flights_;
  std::vector<Flight*> idle_;
  std::vector<Flight*> unsubmitted_;  // in the order of the submission queue
  bool broken_ = false;
};

class UringEngine final : public IoEngine {
 public:
  explicit UringEngine(std::unique_ptr<Ring> first) { idle_.push_back(std::move(first)); }

  std::string_view name() const override { return "uring"; }

  void run(os::File& file, IoJob& job) override {
    std::unique_ptr<Ring> ring = acquire();
    // Out of rings (a limit of the process): slower, but not wrong.
    if (!ring) return make_blocking_engine()->run(file, job);
    if (!Run(*ring, file, job).run()) return;
    std::lock_guard lock(mutex_);
    idle_.push_back(std::move(ring));
  }

 private:
  std::unique_ptr<Ring> acquire() {
    {
      std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        std::unique_ptr<Ring> ring = std::move(idle_.back());
        idle_.pop_back();
        return ring;
      }
    }
    auto ring = open_ring();
    return ring ? std::move(*ring) : nullptr;
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Ring>> idle_;
};

}  // namespace

Result<std::unique_ptr<IoEngine>> make_uring_engine(os::File& file) {
  if (file.descriptor() < 0) return base::fail(Code::kUnsupported, "io_uring needs a file of the kernel");
  auto ring = open_ring();
  if (!ring) return tl::unexpected(std::move(ring).error());
  return std::make_unique<UringEngine>(std::move(*ring));
}

}  // namespace tpusync::flash

#else

namespace tpusync::flash {

base::Result<std::unique_ptr<IoEngine>> make_uring_engine(os::File&) {
  return base::fail(base::Code::kUnsupported, "this build has no io_uring");
}

}  // namespace tpusync::flash

#endif
