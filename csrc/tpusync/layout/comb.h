// Sets of indices at one step, and what two of them have in common: the arithmetic of shards that hold every
// k-th index.
#pragma once

#include <cstdint>
#include <vector>

namespace tpusync::layout {

// A value: the indices first + i * step, i in [0, count). Indices and steps are at least 0 and below 2^48.
struct Comb {
  std::int64_t first = 0, step = 1, count = 0;
  friend bool operator==(const Comb&, const Comb&) = default;
};
using Combs = std::vector<Comb>;

// The indices that both hold: again a comb.
Comb intersect(const Comb& a, const Comb& b);

// What `a` holds and `part`, a subset of it that is not empty, does not: at most a head, a tail and the combs
// in between.
Combs subtract(const Comb& a, const Comb& part);

}  // namespace tpusync::layout
