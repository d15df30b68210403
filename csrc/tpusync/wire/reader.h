// Takes little-endian numbers off a byte string that nobody has checked: all that the decoders of this room
// use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tpusync::wire {

// A value that borrows its source. Reading past the end answers zeros and makes ok() false for good, so that
// a decoder may read all its fields first and look once. Thread-compatible.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> in) : in_(in) {}

  std::uint8_t u8() { return static_cast<std::uint8_t>(number(1)); }
  std::uint16_t u16() { return static_cast<std::uint16_t>(number(2)); }
  std::uint32_t u32() { return static_cast<std::uint32_t>(number(4)); }
  std::uint64_t u64() { return number(8); }

  std::span<const std::byte> bytes(std::size_t count) {
    if (!take(count)) return {};
    return in_.subspan(at_ - count, count);
  }

  template <typename Array>
  void array(Array& out) {
    const auto in = bytes(out.size());
    for (std::size_t i = 0; i < in.size(); ++i) out[i] = in[i];
  }

  std::size_t left() const { return in_.size() - at_; }
  bool ok() const { return ok_; }
  // True when everything was there and nothing is left: what a complete message must be.
  bool finished() const { return ok_ && left() == 0; }

 private:
  bool take(std::size_t count) {
    if (!ok_ || count > left()) {
      ok_ = false;
      return false;
    }
    at_ += count;
    return true;
  }

  std::uint64_t number(std::size_t width) {
    if (!take(width)) return 0;
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < width; ++i) {
      value |= static_cast<std::uint64_t>(in_[at_ - width + i]) << (8 * i);
    }
    return value;
  }

  std::span<const std::byte> in_;
  std::size_t at_ = 0;
  bool ok_ = true;
};

}  // namespace tpusync::wire
