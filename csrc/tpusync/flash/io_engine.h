// Moves the pages of a job between memory and the slot file: the seam between engines.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "tpusync/base/error.h"
#include "tpusync/flash/options.h"
#include "tpusync/os/file.h"

namespace tpusync::flash {

struct Io {
  bool is_write = false;
  std::uint64_t offset = 0;
  std::span<const iovec> pieces;  // stay valid until complete()
};

// What an engine works through, in order, on the thread that calls run().
class IoJob {
 public:
  virtual ~IoJob() = default;
  virtual std::size_t size() const = 0;
  // Called right before transfer `i` would start. False: there is nothing to transfer, and no complete(i).
  virtual bool prepare(std::size_t i, Io& io) = 0;
  // Called once the transfer has ended, in any order. A read that reached the end of the file is kIo.
  virtual void complete(std::size_t i, base::Status status) = 0;
};

// Thread-safe: each worker calls run() for jobs of its own.
class IoEngine {
 public:
  virtual ~IoEngine() = default;
  virtual std::string_view name() const = 0;
  // How many workers keep a disk busy, unless the user knows better.
  virtual int num_threads() const = 0;
  // Of the memory it was made with: what the kernel knows in advance.
  virtual std::uint64_t num_registered_bytes() const { return 0; }
  virtual void run(os::File& file, IoJob& job) = 0;
};

// One transfer at a time, by the calling thread.
std::unique_ptr<IoEngine> make_blocking_engine();
// Several at a time through io_uring. kUnsupported where the kernel, the build or `file` does not allow it.
// `memory` is where most transfers come from and go to: it is registered with the kernel where the system
// lets us, and must stay mapped while the engine lives.
base::Result<std::unique_ptr<IoEngine>> make_uring_engine(os::File& file,
                                                          std::span<const std::span<std::byte>> memory = {});
base::Result<std::unique_ptr<IoEngine>> make_engine(IoKind kind, os::File& file,
                                                    std::span<const std::span<std::byte>> memory = {});

}  // namespace tpusync::flash
