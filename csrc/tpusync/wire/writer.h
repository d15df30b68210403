// Appends little-endian numbers to a byte string: all that the encoders of this room are made of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tpusync::wire {

using Bytes = std::vector<std::byte>;
using BytesView = std::span<const std::byte>;

// A value that borrows its target. Thread-compatible.
class Writer {
 public:
  explicit Writer(Bytes& out) : out_(out) {}

  void u8(std::uint8_t value) { out_.push_back(std::byte{value}); }
  void u16(std::uint16_t value) { number(value, 2); }
  void u32(std::uint32_t value) { number(value, 4); }
  void u64(std::uint64_t value) { number(value, 8); }
  void bytes(BytesView value) { out_.insert(out_.end(), value.begin(), value.end()); }

 private:
  void number(std::uint64_t value, int width) {
    for (int i = 0; i < width; ++i) out_.push_back(static_cast<std::byte>(value >> (8 * i)));
  }

  Bytes& out_;
};

}  // namespace tpusync::wire
