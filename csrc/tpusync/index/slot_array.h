// An array with one element per slot that grows without copying and without slack: 4096 elements at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "tpusync/index/page_key.h"

namespace tpusync::index {

// Thread-compatible. References stay valid while the array grows.
template <typename T>
class SlotArray {
 public:
  void grow_to(std::size_t size) {
    while (chunks_.size() * kChunk < size) chunks_.push_back(std::make_unique<T[]>(kChunk));
  }
  T& operator[](SlotId slot) { return chunks_[to_number(slot) / kChunk][to_number(slot) % kChunk]; }
  const T& operator[](SlotId slot) const {
    return chunks_[to_number(slot) / kChunk][to_number(slot) % kChunk];
  }

 private:
  static constexpr std::size_t kChunk = 4096;
  std::vector<std::unique_ptr<T[]>> chunks_;
};

}  // namespace tpusync::index
