// The bytes of a box of a tiled array, in the order in which they lie in memory: what a copy that keeps the
// layout moves, and where padding is.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/layout/copy_nest.h"
#include "tpusync/layout/copy_run.h"

namespace tpusync::layout {

// How `count` indices from `origin` on are placed, for each dimension of a box.
struct AxisRange {
  const AxisMap& map;
  std::uint64_t origin = 0;
  std::uint64_t count = 0;
};

// The bytes that hold the elements of a box, ascending and merged. The destination of the runs is a buffer
// that they fill without gaps. kInvalid where elements of less than a byte do not fill whole bytes;
// kExhausted where it takes more than 2^22 runs.
base::Result<std::vector<CopyRun>> runs_of(std::span<const AxisRange> box, std::uint64_t element_bits);

// The bytes of [0, size_bytes) that `runs` (ascending) leave out, as runs of equal offsets on both sides.
std::vector<CopyRun> gaps_between(std::span<const CopyRun> runs, std::uint64_t size_bytes);

}  // namespace tpusync::layout
