// XXH3, 64 bits, with a seed: the one checksum of every format here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace tpusync::base {

std::uint64_t checksum64(std::span<const std::byte> bytes, std::uint64_t seed = 0);

// The checksum of bytes that come in pieces; equal to checksum64 of their concatenation. Thread-compatible.
class Checksum {
 public:
  explicit Checksum(std::uint64_t seed);
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;
  ~Checksum();

  void update(std::span<const std::byte> bytes);
  std::uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tpusync::base
