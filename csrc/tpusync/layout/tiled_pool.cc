#include "tpusync/layout/tiled_pool.h"

#include <fmt/format.h>

#include <utility>

namespace tpusync::layout {

using base::Code;
using base::Result;
using base::Status;

namespace {

tl::unexpected<base::Error> refuse(const TiledLayout& layer, std::string_view what) {
  return base::fail(Code::kInvalid, fmt::format("KV pool of layout {}: {}", layer.text(), what));
}

// One index over several dimensions of the layout, and how many there are.
struct Index {
  AxisMap map;
  std::uint64_t size = 1;
};

Result<Index> index_over(const TiledLayout& layer, const std::vector<std::size_t>& dims) {
  Index out;
  for (const std::size_t dim : dims) {
    const auto size = static_cast<std::uint64_t>(layer.dims()[dim]);
    if (size == 0) return refuse(layer, fmt::format("dimension {} is empty", dim));
    if (dim == dims.front()) {
      out.map = layer.axis(dim);
    } else {
      auto both = joined(out.map, layer.axis(dim), size);
      if (!both) return tl::unexpected(std::move(both).error());
      out.map = *std::move(both);
    }
    out.size *= size;  // a divisor of the elements of the layout
  }
  return out;
}

Status check_dims(const TiledLayout& layer, const TiledPool::Options& options) {
  std::vector<int> times(layer.rank());
  for (const auto* dims : {&options.slots, &options.heads, &options.elements}) {
    for (const std::size_t dim : *dims) {
      if (dim >= layer.rank()) return refuse(layer, fmt::format("no dimension {}", dim));
      ++times[dim];
    }
  }
  for (std::size_t dim = 0; dim < times.size(); ++dim) {
    if (times[dim] != 1) return refuse(layer, fmt::format("dimension {} is named {} times", dim, times[dim]));
  }
  return {};
}

}  // namespace

Result<TiledPool> TiledPool::make(TiledLayout layer, const Options& options) {
  TPUSYNC_TRY(check_dims(layer, options));
  auto slots = index_over(layer, options.slots), heads = index_over(layer, options.heads),
       elements = index_over(layer, options.elements);
  for (auto* each : {&slots, &heads, &elements}) {
    if (!*each) return tl::unexpected(std::move(*each).error());
  }
  const auto num_heads = static_cast<std::int64_t>(heads->size), first = options.head_first,
             step = options.head_step;
  if (first < 0 || first >= num_heads || step < 1 || step > num_heads) {
    return refuse(layer, fmt::format("every {}th of {} heads from head {} on", step, num_heads, first));
  }
  const auto all = static_cast<std::int64_t>(elements->size);
  const std::int64_t used = options.num_elements == 0 ? all : options.num_elements;
  if (used < 1 || used > all || static_cast<std::uint64_t>(used) * layer.element_bits() % 8 != 0) {
    return refuse(layer, fmt::format("{} of {} elements of a head, in whole bytes", used, all));
  }
  auto some = every(heads->map, static_cast<std::uint64_t>(first), static_cast<std::uint64_t>(step));
  if (!some) return tl::unexpected(std::move(some).error());
  TiledPool pool(std::move(layer));
  pool.slots_ = std::move(slots->map);
  pool.heads_ = *std::move(some);
  pool.elements_ = std::move(elements->map);
  pool.num_slots_ = slots->size;
  pool.num_heads_ = static_cast<std::uint64_t>((num_heads - first + step - 1) / step);
  pool.num_elements_ = static_cast<std::uint64_t>(used);
  return pool;
}

}  // namespace tpusync::layout
