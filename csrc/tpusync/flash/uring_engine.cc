#include "tpusync/flash/io_engine.h"

#ifdef TPUSYNC_URING

#include <fmt/format.h>
#include <liburing.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "tpusync/base/bytes.h"
#include "tpusync/base/log.h"

namespace tpusync::flash {

using base::Code;
using base::Result;
using base::Status;

namespace {

// What one worker keeps in flight: as much as two of them need to keep a disk busy (measured by bench store),
// and no more than a slow one moves well within a latency budget.
constexpr unsigned kDepth = 64;
constexpr std::uint64_t kInFlightBytesMax = 32 * base::kMiB;
// From this size on, pieces of a page that lie apart are worth a transfer each, if that saves looking up
// their pages.
constexpr std::size_t kRegisteredPieceBytesMin = 64 * base::kKiB;
// Checksums are most of a worker's time: two cores' worth of them is more than a disk delivers.
constexpr int kNumThreads = 2;

// The kernel's limit of one registered buffer.
constexpr std::size_t kBufferBytesMax = 1 * base::kGiB;

// The caller's memory as buffers that the kernel knows: their pages are looked up once, not at every
// transfer.
class Buffers {
 public:
  explicit Buffers(std::span<const std::span<std::byte>> memory) {
    for (std::span<std::byte> rest : memory) {
      while (!rest.empty()) {
        const std::span<std::byte> chunk = rest.first(std::min(rest.size(), kBufferBytesMax));
        buffers_.push_back({chunk.data(), chunk.size()});
        rest = rest.subspan(chunk.size());
      }
    }
    std::sort(buffers_.begin(), buffers_.end(),
              [](const iovec& a, const iovec& b) { return a.iov_base < b.iov_base; });
  }

  std::span<const iovec> all() const { return buffers_; }

  // The number of the buffer that all of `piece` lies in.
  std::optional<int> find(const iovec& piece) const {
    auto after =
        std::upper_bound(buffers_.begin(), buffers_.end(), piece.iov_base,
                         [](const void* address, const iovec& buffer) { return address < buffer.iov_base; });
    if (after == buffers_.begin()) return std::nullopt;
    const iovec& buffer = *std::prev(after);
    const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(piece.iov_base) -
                                                 static_cast<const std::byte*>(buffer.iov_base));
    if (offset > buffer.iov_len || piece.iov_len > buffer.iov_len - offset) return std::nullopt;
    return static_cast<int>(std::prev(after) - buffers_.begin());
  }

 private:
  std::vector<iovec> buffers_;  // by address
};

struct Ring {
  io_uring ring{};
  bool open = false;
  bool registered = false;  // it knows the buffers
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

// A transfer of the job, under way in one flight or more.
struct Transfer {
  std::size_t index = 0;
  Io io;
  std::uint64_t num_bytes = 0;
  std::size_t num_flights = 0;
  Status status;  // the first failure
};

// What the kernel is asked for at once; `left` shrinks when it moves only a part.
struct Flight {
  Transfer* transfer = nullptr;
  std::uint64_t offset = 0;
  std::vector<iovec> left;
};

// Works through one job on one ring. Confined to the calling thread.
class Run {
 public:
  Run(Ring& ring, const Buffers& buffers, os::File& file, IoJob& job)
      : ring_(ring), buffers_(buffers), file_(file), job_(job), transfers_(kDepth), flights_(kDepth) {
    for (Transfer& transfer : transfers_) idle_transfers_.push_back(&transfer);
    for (Flight& flight : flights_) idle_.push_back(&flight);
  }

  // False: the ring must not be used again.
  bool run() {
    std::size_t next = 0;
    while (next < job_.size() || num_in_flight() > 0) {
      while (next < job_.size() && !idle_.empty() && in_flight_bytes_ < kInFlightBytesMax) begin(next++);
      if (num_in_flight() > 0) reap();
    }
    return !broken_;
  }

 private:
  std::size_t num_in_flight() const { return flights_.size() - idle_.size(); }

  void begin(std::size_t index) {
    Transfer& transfer = *idle_transfers_.back();  // never none: each has a flight at least
    transfer = {.index = index, .io = {}, .num_bytes = 0, .num_flights = 0, .status = {}};
    if (!job_.prepare(index, transfer.io)) return;
    idle_transfers_.pop_back();
    const std::vector<iovec> pieces = merged(transfer.io.pieces);
    for (const iovec& piece : pieces) transfer.num_bytes += piece.iov_len;
    in_flight_bytes_ += transfer.num_bytes;
    if (go_apart(pieces)) {
      std::uint64_t offset = transfer.io.offset;
      for (const iovec& piece : pieces) {
        start(transfer, offset, std::span(&piece, 1));
        offset += piece.iov_len;
      }
    } else {
      start(transfer, transfer.io.offset, pieces);
    }
    // At once: the disk works while the next page's checksum is computed.
    submit();
    while (io_uring_cq_ready(&ring_.ring) > 0) reap();
  }

  static std::vector<iovec> merged(std::span<const iovec> pieces) {
    std::vector<iovec> merged;
    for (const iovec& piece : pieces) {
      const bool continues =
          !merged.empty() &&
          static_cast<std::byte*>(merged.back().iov_base) + merged.back().iov_len == piece.iov_base;
      continues ? void(merged.back().iov_len += piece.iov_len) : merged.push_back(piece);
    }
    return merged;
  }

  // The kernel takes one piece of a registered buffer at a time. Small ones are better off together.
  bool go_apart(std::span<const iovec> pieces) const {
    return ring_.registered && pieces.size() > 1 && pieces.size() <= idle_.size() &&
           std::all_of(pieces.begin(), pieces.end(), [this](const iovec& piece) {
             return piece.iov_len >= kRegisteredPieceBytesMin && buffers_.find(piece);
           });
  }

  void start(Transfer& transfer, std::uint64_t offset, std::span<const iovec> pieces) {
    Flight& flight = *idle_.back();
    idle_.pop_back();
    flight.transfer = &transfer;
    flight.offset = offset;
    flight.left.assign(pieces.begin(), pieces.end());
    ++transfer.num_flights;
    queue(flight);
  }

  void queue(Flight& flight) {
    io_uring_sqe* const sqe = io_uring_get_sqe(&ring_.ring);  // never null: as many entries as flights
    const iovec& first = flight.left.front();
    const auto num_pieces = static_cast<unsigned>(std::min<std::size_t>(flight.left.size(), IOV_MAX));
    const std::optional<int> buffer =
        ring_.registered && num_pieces == 1 ? buffers_.find(first) : std::nullopt;
    const int file = file_.descriptor();
    const auto length = static_cast<unsigned>(buffer ? first.iov_len : 0);  // a buffer has no more than 1 GiB
    if (flight.transfer->io.is_write) {
      buffer ? io_uring_prep_write_fixed(sqe, file, first.iov_base, length, flight.offset, *buffer)
             : io_uring_prep_writev(sqe, file, flight.left.data(), num_pieces, flight.offset);
    } else {
      buffer ? io_uring_prep_read_fixed(sqe, file, first.iov_base, length, flight.offset, *buffer)
             : io_uring_prep_readv(sqe, file, flight.left.data(), num_pieces, flight.offset);
    }
    io_uring_sqe_set_data(sqe, &flight);
    unsubmitted_.push_back(&flight);
  }

  void submit() {
    while (!unsubmitted_.empty()) {
      const int answer = io_uring_submit(&ring_.ring);
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
    while (answer == -EINTR || answer == -EAGAIN) answer = io_uring_wait_cqe(&ring_.ring, &cqe);
    if (answer < 0) return;
    Flight& flight = *static_cast<Flight*>(io_uring_cqe_get_data(cqe));
    const int result = cqe->res;
    io_uring_cqe_seen(&ring_.ring, cqe);
    if (result == -EINTR || result == -EAGAIN) {
      queue(flight);
    } else if (result < 0) {
      const bool is_write = flight.transfer->io.is_write;
      end(flight, base::fail_errno(is_write ? "write to the slot file" : "read from the slot file", -result));
    } else {
      advance(flight, static_cast<std::size_t>(result));
    }
  }

  void advance(Flight& flight, std::size_t num_bytes) {
    flight.offset += num_bytes;
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
    Transfer& transfer = *flight.transfer;
    if (!status && transfer.status) transfer.status = std::move(status);
    if (--transfer.num_flights > 0) return;
    idle_transfers_.push_back(&transfer);
    in_flight_bytes_ -= transfer.num_bytes;
    job_.complete(transfer.index, std::move(transfer.status));
  }

  Ring& ring_;
  const Buffers& buffers_;
  os::File& file_;
  IoJob& job_;
  std::vector<Transfer> transfers_;
  std::vector<Transfer*> idle_transfers_;
  std::vector<Flight> flights_;
  std::vector<Flight*> idle_;
  std::vector<Flight*> unsubmitted_;  // in the order of the submission queue
  std::uint64_t in_flight_bytes_ = 0;
  bool broken_ = false;
};

class UringEngine final : public IoEngine {
 public:
  UringEngine(std::unique_ptr<Ring> first, std::span<const std::span<std::byte>> memory) : buffers_(memory) {
    idle_.push_back(std::move(first));
    if (buffers_.all().empty()) return;
    // Before there is work: it takes a while, all memory is made present.
    while (idle_.size() < 2 * kNumThreads) {
      auto ring = open_ring();
      if (!ring) break;
      idle_.push_back(std::move(*ring));
    }
    for (const std::unique_ptr<Ring>& ring : idle_) {
      if (!register_buffers(*ring)) break;
    }
  }

  std::string_view name() const override { return "uring"; }
  int num_threads() const override { return kNumThreads; }
  std::uint64_t num_registered_bytes() const override { return registered_bytes_; }

  void run(os::File& file, IoJob& job) override {
    std::unique_ptr<Ring> ring = acquire();
    // Out of rings (a limit of the process): slower, but not wrong.
    if (!ring) return make_blocking_engine()->run(file, job);
    if (!Run(*ring, buffers_, file, job).run()) return;
    std::lock_guard lock(mutex_);
    ring->registered ? idle_.push_back(std::move(ring)) : idle_.push_front(std::move(ring));
  }

 private:
  bool register_buffers(Ring& ring) {
    const std::span<const iovec> all = buffers_.all();
    const int answer = io_uring_register_buffers(&ring.ring, all.data(), static_cast<unsigned>(all.size()));
    ring.registered = answer == 0;
    std::uint64_t num_bytes = 0;
    for (const iovec& buffer : all) num_bytes += buffer.iov_len;
    if (ring.registered) {
      registered_bytes_ = num_bytes;
    } else {
      base::log(
          base::LogLevel::kInfo,
          fmt::format("{} bytes of memory cannot be registered with io_uring ({}; 'ulimit -l' limits it): "
                      "their pages are looked up at every transfer",
                      num_bytes, std::strerror(-answer)));
    }
    return ring.registered;
  }

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

  const Buffers buffers_;
  std::uint64_t registered_bytes_ = 0;
  std::mutex mutex_;
  std::deque<std::unique_ptr<Ring>> idle_;  // those that know the buffers last: they are taken first
};

}  // namespace

Result<std::unique_ptr<IoEngine>> make_uring_engine(os::File& file,
                                                    std::span<const std::span<std::byte>> memory) {
  if (file.descriptor() < 0) return base::fail(Code::kUnsupported, "io_uring needs a file of the kernel");
  auto ring = open_ring();
  if (!ring) return tl::unexpected(std::move(ring).error());
  return std::make_unique<UringEngine>(std::move(*ring), memory);
}

}  // namespace tpusync::flash

#else

namespace tpusync::flash {

base::Result<std::unique_ptr<IoEngine>> make_uring_engine(os::File&, std::span<const std::span<std::byte>>) {
  return base::fail(base::Code::kUnsupported, "this build has no io_uring");
}

}  // namespace tpusync::flash

#endif
