// Copies that know the checksum of what arrived, at the speed of plain ones: each chunk is summed up while
// the first-level cache holds it, and what is delivered does not pass through the caches where the machine
// can do that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace tpusync::host {

// Equal to base::checksum64 of the concatenated bytes. Thread-compatible.
class CheckedCopy {
 public:
  // `kernel`: an index into checksum_instructions(), for tests.
  explicit CheckedCopy(std::uint64_t seed, std::size_t kernel = 0);
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
  const std::size_t kernel_;
};

// What sums can be computed with on this machine, the fastest first, "baseline" last.
std::vector<const char*> checksum_instructions();

}  // namespace tpusync::host
