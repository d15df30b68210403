#include "tpusync/layout/copy_nest.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace tpusync::layout {

using base::Code;
using base::Result;

namespace {

constexpr std::uint64_t kPlacesMax = std::uint64_t{1} << 24;
constexpr std::uint64_t kNestsMax = std::uint64_t{1} << 20;

// A stretch of one dimension that loops describe, in elements.
struct Segment {
  std::uint64_t src = 0;
  std::uint64_t dst = 0;
  std::vector<Loop> loops;  // outermost first
};

struct Place {
  std::uint64_t src, dst;
};

// `count` places at one stride. The strides of a single place mean nothing.
struct Progression {
  std::size_t first;
  Loop loop;
};

std::uint64_t steps_equal(std::span<const Place> places, std::size_t first) {
  if (first + 1 >= places.size()) return 1;
  const Place &a = places[first], &b = places[first + 1];
  if (b.src < a.src || b.dst < a.dst) return 1;
  std::size_t end = first + 2;
  while (end < places.size() && places[end].src - places[end - 1].src == b.src - a.src &&
         places[end].dst - places[end - 1].dst == b.dst - a.dst) {
    ++end;
  }
  return end - first;
}

std::vector<Progression> progressions(std::span<const Place> places) {
  std::vector<Progression> out;
  for (std::size_t at = 0; at < places.size();) {
    const std::uint64_t count = steps_equal(places, at);
    Loop loop{.count = count, .src_stride = 0, .dst_stride = 0};
    if (count > 1) {
      loop.src_stride = places[at + 1].src - places[at].src;
      loop.dst_stride = places[at + 1].dst - places[at].dst;
    }
    out.push_back({at, loop});
    at += count;
  }
  return out;
}

// Finds the loops in a list of places: stretches at one stride, and again among equal stretches.
std::vector<Segment> compress(std::span<const Place> places) {
  const std::vector<Progression> found = progressions(places);
  std::vector<Segment> out;
  for (std::size_t i = 0; i < found.size();) {
    std::size_t end = i + 1;
    while (end < found.size() && found[end].loop == found[i].loop) ++end;
    std::vector<Place> starts;
    for (std::size_t j = i; j < end; ++j) starts.push_back(places[found[j].first]);
    if (found[i].loop.count == 1 && starts.size() > 1) {
      // Places without any order between them.
      for (const Place& start : starts) out.push_back({start.src, start.dst, {}});
    } else if (starts.size() == 1) {
      out.push_back({starts[0].src, starts[0].dst, {found[i].loop}});
    } else {
      for (Segment& segment : compress(starts)) {
        segment.loops.push_back(found[i].loop);
        out.push_back(std::move(segment));
      }
    }
    i = end;
  }
  return out;
}

std::vector<Place> places_of(const AxisCopy& axis, std::uint64_t begin, std::uint64_t end) {
  std::vector<Place> places;
  places.reserve(end - begin);
  for (std::uint64_t i = begin; i < end; ++i) {
    places.push_back({axis.src(axis.src_origin + i), axis.dst(axis.dst_origin + i)});
  }
  return places;
}

// Both maps repeat after the least common multiple of their periods: that many places are looked at, and the
// rest.
Result<std::vector<Segment>> segments_of(const AxisCopy& axis) {
  const std::uint64_t period = std::lcm(axis.src.period(), axis.dst.period());
  if (std::min(period, axis.count) > kPlacesMax) {
    return base::fail(Code::kUnsupported,
                      fmt::format("layouts that repeat together after {} elements only", period));
  }
  if (axis.count < 2 * period) return compress(places_of(axis, 0, axis.count));
  const Loop repeat{.count = axis.count / period,
                    .src_stride = period / axis.src.period() * axis.src.stride,
                    .dst_stride = period / axis.dst.period() * axis.dst.stride};
  std::vector<Segment> out = compress(places_of(axis, 0, period));
  for (Segment& segment : out) segment.loops.insert(segment.loops.begin(), repeat);
  for (Segment& rest : compress(places_of(axis, repeat.count * period, axis.count)))
    out.push_back(std::move(rest));
  return out;
}

std::uint64_t end_of(std::uint64_t offset, const CopyNest& nest, std::uint64_t Loop::* stride) {
  for (const Loop& loop : nest.loops) offset += (loop.count - 1) * (loop.*stride);
  return offset + nest.length;
}

// Takes the loop that lengthens the piece out of the nest; false when there is none.
bool lengthen(CopyNest& nest) {
  const auto loop = std::ranges::find_if(
      nest.loops, [&](const Loop& l) { return l.src_stride == nest.length && l.dst_stride == nest.length; });
  if (loop == nest.loops.end()) return false;
  nest.length *= loop->count;
  nest.loops.erase(loop);
  return true;
}

// Makes one loop of two where the outer goes on where the inner ends; false when there are no such two.
bool join(CopyNest& nest) {
  for (std::size_t inner = 0; inner < nest.loops.size(); ++inner) {
    for (std::size_t outer = 0; outer < nest.loops.size(); ++outer) {
      Loop& in = nest.loops[inner];
      const Loop& out = nest.loops[outer];
      if (inner == outer || out.src_stride != in.count * in.src_stride ||
          out.dst_stride != in.count * in.dst_stride) {
        continue;
      }
      in.count *= out.count;
      nest.loops.erase(nest.loops.begin() + static_cast<std::ptrdiff_t>(outer));
      return true;
    }
  }
  return false;
}

}  // namespace

std::uint64_t CopyNest::size_bits() const {
  std::uint64_t size = length;
  for (const Loop& loop : loops) size *= loop.count;
  return size;
}

std::uint64_t CopyNest::src_end() const {
  return end_of(src_offset, *this, &Loop::src_stride);
}
std::uint64_t CopyNest::dst_end() const {
  return end_of(dst_offset, *this, &Loop::dst_stride);
}

bool CopyNest::in_bytes() const {
  return src_offset % 8 == 0 && dst_offset % 8 == 0 && length % 8 == 0 &&
         std::ranges::all_of(loops,
                             [](const Loop& l) { return l.src_stride % 8 == 0 && l.dst_stride % 8 == 0; });
}

void make_canonical(CopyNest& nest) {
  std::erase_if(nest.loops, [](const Loop& loop) { return loop.count == 1; });
  while (lengthen(nest) || join(nest)) {
  }
  std::ranges::stable_sort(nest.loops, [](const Loop& a, const Loop& b) {
    return std::pair(a.dst_stride, a.src_stride) > std::pair(b.dst_stride, b.src_stride);
  });
}

Result<std::vector<CopyNest>> nests_of(std::span<const AxisCopy> axes, std::uint64_t element_bits) {
  std::vector<CopyNest> nests{{.src_offset = 0, .dst_offset = 0, .length = element_bits, .loops = {}}};
  for (const AxisCopy& axis : axes) {
    if (axis.count == 0) return std::vector<CopyNest>();
    std::vector<CopyNest> next;
    const auto segments = segments_of(axis);
    if (!segments) return tl::unexpected(segments.error());
    if (segments->size() > kNestsMax / nests.size()) {
      return base::fail(Code::kUnsupported,
                        fmt::format("layouts so irregular that a copy takes over {} loops", kNestsMax));
    }
    next.reserve(nests.size() * segments->size());
    for (const CopyNest& nest : nests) {
      for (const Segment& segment : *segments) {
        CopyNest& grown = next.emplace_back(nest);
        grown.src_offset += segment.src * element_bits;
        grown.dst_offset += segment.dst * element_bits;
        for (const Loop& loop : segment.loops) {
          grown.loops.push_back({loop.count, loop.src_stride * element_bits, loop.dst_stride * element_bits});
        }
      }
    }
    nests = std::move(next);
  }
  for (CopyNest& nest : nests) make_canonical(nest);
  return nests;
}

}  // namespace tpusync::layout
