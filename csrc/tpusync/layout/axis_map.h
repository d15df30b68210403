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

#include "tpusync/base/error.h"

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

// Two dimensions as one: index i is (i / minor_size, i % minor_size). kUnsupported where the map repeats too
// late.
base::Result<AxisMap> joined(const AxisMap& major, const AxisMap& minor, std::uint64_t minor_size);

// The map of the indices first, first + step, first + 2 * step, ... kUnsupported as above.
base::Result<AxisMap> every(const AxisMap& map, std::uint64_t first, std::uint64_t step);

}  // namespace tpusync::layout
