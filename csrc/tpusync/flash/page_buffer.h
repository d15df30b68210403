// The memory side of one transfer: the caller's pieces where the file can take them, else an aligned copy.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "tpusync/os/aligned_buffer.h"
#include "tpusync/os/file.h"

namespace tpusync::flash {

// Buffers of one size, kept for the next use. Thread-safe.
class BufferPool {
 public:
  explicit BufferPool(std::size_t buffer_bytes) : buffer_bytes_(buffer_bytes) {}
  os::AlignedBuffer acquire();
  void release(os::AlignedBuffer buffer);

 private:
  const std::size_t buffer_bytes_;
  std::mutex mutex_;
  std::vector<os::AlignedBuffer> free_;
};

// Confined to the thread that runs the transfer. The caller's memory outlives it.
class PageBuffer {
 public:
  PageBuffer(std::span<const std::uint64_t> addresses, std::span<const std::uint64_t> lengths,
             const os::File& file, BufferPool& pool);
  PageBuffer(const PageBuffer&) = delete;
  PageBuffer& operator=(const PageBuffer&) = delete;
  ~PageBuffer();

  // What to transfer.
  std::span<const iovec> pieces() const { return pieces_; }
  bool bounced() const { return bounce_.has_value(); }

  void gather();   // before a write: fills the copy, if there is one
  void scatter();  // after a read: empties it
  // Of the page's bytes as they lie in what was or will be transferred.
  std::uint64_t checksum(std::uint64_t seed) const;

 private:
  std::vector<iovec> caller_;
  std::vector<iovec> pieces_;
  std::uint64_t page_bytes_ = 0;
  BufferPool* pool_;
  std::optional<os::AlignedBuffer> bounce_;
};

}  // namespace tpusync::flash
