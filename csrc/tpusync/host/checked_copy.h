// Copies that know the checksum of what arrived: each chunk is summed up while the cache still holds it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace tpusync::host {

// Equal to base::checksum64 of the concatenated bytes. Thread-compatible.
class CheckedCopy {
 public:
  explicit CheckedCopy(std::uint64_t seed);
  CheckedCopy(const CheckedCopy&) = delete;
  CheckedCopy& operator=(const CheckedCopy&) = delete;
  ~CheckedCopy();

  void copy(std::byte* to, std::span<const std::byte> from);
  // Only sums up.
  void look(std::span<const std::byte> bytes);
  std::uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// "avx2" or "baseline": what the sums are computed with on this machine.
const char* checksum_instructions();

}  // namespace tpusync::host
