// Page-aligned memory for direct transfers of what the caller did not align.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <span>

namespace tpusync::os {

// A resource. Thread-compatible.
class AlignedBuffer {
 public:
  static constexpr std::size_t kAlignBytes = 4096;

  explicit AlignedBuffer(std::size_t size_bytes)
      : bytes_(static_cast<std::byte*>(::operator new(size_bytes, std::align_val_t{kAlignBytes}))),
        size_bytes_(size_bytes) {}

  std::span<std::byte> bytes() const { return {bytes_.get(), size_bytes_}; }

 private:
  struct Free {
    void operator()(std::byte* bytes) const { ::operator delete(bytes, std::align_val_t{kAlignBytes}); }
  };
  std::unique_ptr<std::byte, Free> bytes_;
  std::size_t size_bytes_;
};

}  // namespace tpusync::os
