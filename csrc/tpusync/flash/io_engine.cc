#include "tpusync/flash/io_engine.h"

#include <fmt/format.h>

#include "tpusync/base/log.h"

namespace tpusync::flash {

using base::Code;
using base::Result;
using base::Status;

namespace {

// Each has one transfer in flight.
constexpr int kNumThreads = 8;

class BlockingEngine final : public IoEngine {
 public:
  std::string_view name() const override { return "threads"; }
  int num_threads() const override { return kNumThreads; }

  void run(os::File& file, IoJob& job) override {
    for (std::size_t i = 0; i < job.size(); ++i) {
      Io io;
      if (job.prepare(i, io)) job.complete(i, transfer(file, io));
    }
  }

 private:
  static Status transfer(os::File& file, const Io& io) {
    if (io.is_write) return file.write(io.pieces, io.offset);
    const auto num_read = file.read(io.pieces, io.offset);
    if (!num_read) return tl::unexpected(num_read.error());
    std::size_t num_wanted = 0;
    for (const iovec& piece : io.pieces) num_wanted += piece.iov_len;
    if (*num_read == num_wanted) return {};
    return base::fail(Code::kIo, fmt::format("read {} of {} bytes at {}: the slot file ends there", *num_read,
                                             num_wanted, io.offset));
  }
};

}  // namespace

std::unique_ptr<IoEngine> make_blocking_engine() {
  return std::make_unique<BlockingEngine>();
}

Result<std::unique_ptr<IoEngine>> make_engine(IoKind kind, os::File& file,
                                              std::span<const std::span<std::byte>> memory) {
  if (kind == IoKind::kUring) return make_uring_engine(file, memory);
  if (kind == IoKind::kAuto && file.direct()) {
    auto engine = make_uring_engine(file, memory);
    if (engine) return engine;
  }
  return make_blocking_engine();
}

}  // namespace tpusync::flash
