// A CopyNest is a CopyRun with any number of strides: pieces of `length` bits, repeated by loops within
// loops. It is what a change of layout comes down to, however the two sides are tiled.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/layout/axis_map.h"

namespace tpusync::layout {

// A value, in the unit of its nest.
struct Loop {
  std::uint64_t count = 1;
  std::uint64_t src_stride = 0;
  std::uint64_t dst_stride = 0;
  friend bool operator==(const Loop&, const Loop&) = default;
};

// A value, in bits. Loops run outermost first. Canonical form: no loop of one round, no two loops that are
// one, no loop that only lengthens the piece; larger destination strides further out.
struct CopyNest {
  std::uint64_t src_offset = 0;
  std::uint64_t dst_offset = 0;
  std::uint64_t length = 0;
  std::vector<Loop> loops;

  std::uint64_t size_bits() const;
  std::uint64_t src_end() const;  // one past the last bit that is touched
  std::uint64_t dst_end() const;

  // True where all of it falls on whole bytes.
  bool in_bytes() const;

  friend bool operator==(const CopyNest&, const CopyNest&) = default;
};

// How `count` indices of one dimension move: index origin + i of the source becomes index origin + i of the
// other.
struct AxisCopy {
  const AxisMap& src;
  const AxisMap& dst;
  std::uint64_t src_origin = 0;
  std::uint64_t dst_origin = 0;
  std::uint64_t count = 0;
};

// The nests that together move every element of the box that `axes` span, each once, elements being
// `element_bits`. kUnsupported for maps so irregular that this takes more than 2^20 nests or 2^24 places of
// one dimension.
base::Result<std::vector<CopyNest>> nests_of(std::span<const AxisCopy> axes, std::uint64_t element_bits);

// Brings a nest to canonical form.
void make_canonical(CopyNest& nest);

}  // namespace tpusync::layout
