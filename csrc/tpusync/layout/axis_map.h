// How one dimension of an array enters the place of an element in memory.
//
// A tiled layout is a sum: the offset of element (i0, i1, ...) is map0(i0) + map1(i1) + ..., because every
// coordinate of the tiled shape is made from one index by divisions and remainders. Each map repeats with a
// period:
//
//   map(i) = i / period * stride + within[i % period]
#pragma once

#include <cstdint>
#include <vector>

namespace tpusync::layout {

// A value, in elements.
struct AxisMap {
  std::uint64_t stride = 0;
  std::vector<std::uint64_t> within{0};

  std::uint64_t period() const { return within.size(); }
  std::uint64_t operator()(std::uint64_t index) const {
    return index / period() * stride + within[index % period()];
  }
  friend bool operator==(const AxisMap&, const AxisMap&) = default;
};

}  // namespace tpusync::layout
