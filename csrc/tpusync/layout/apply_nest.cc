#include "tpusync/layout/apply_nest.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

namespace tpusync::layout {

namespace {

constexpr std::size_t kWordBytes = 4;
constexpr std::uint64_t kRunBytesMin = 16;  // pieces from here on are copied as they are

constexpr std::uint64_t kLookAheadBytes = 1024;

// A nest in bytes whose innermost loops have a name.
struct Shape {
  NestKernel kernel = NestKernel::kElements;
  Loop lanes, rows, block;  // block: the next loop outward
  Loop groups;              // transpose: goes on where the rows end in dst, elsewhere in src
  std::vector<Loop> outer;
};

std::optional<std::size_t> find_loop(const std::vector<Loop>& loops, std::uint64_t Loop::* stride,
                                     std::uint64_t value) {
  for (std::size_t i = 0; i < loops.size(); ++i) {
    if (loops[i].*stride == value) return i;
  }
  return std::nullopt;
}

std::vector<Loop> without(const std::vector<Loop>& loops, std::size_t a, std::size_t b) {
  std::vector<Loop> out;
  for (std::size_t i = 0; i < loops.size(); ++i) {
    if (i != a && i != b) out.push_back(loops[i]);
  }
  return out;
}

Shape named(NestKernel kernel, const std::vector<Loop>& loops, std::size_t lanes, std::size_t rows) {
  return {kernel, loops[lanes], rows < loops.size() ? loops[rows] : Loop{},
          {},     {},           without(loops, lanes, rows)};
}

// Loops and length in bytes. The packed kernels are those for words of 32 bits.
Shape shape_of_small(const std::vector<Loop>& loops, std::uint64_t length) {
  const std::size_t none = loops.size();
  const std::uint64_t pack =
      kWordBytes / std::max<std::uint64_t>(1, std::min<std::uint64_t>(length, kWordBytes));
  const bool packable = length == 1 || length == 2;
  const auto src_minor = find_loop(loops, &Loop::src_stride, length);
  const auto dst_minor = find_loop(loops, &Loop::dst_stride, length);
  if (packable && src_minor && loops[*src_minor].count == pack) {
    const auto lanes = find_loop(loops, &Loop::src_stride, kWordBytes);
    if (lanes && loops[*lanes].dst_stride == length)
      return named(NestKernel::kSplit, loops, *lanes, *src_minor);
  }
  if (packable && dst_minor && loops[*dst_minor].count == pack) {
    const auto lanes = find_loop(loops, &Loop::dst_stride, kWordBytes);
    if (lanes && loops[*lanes].src_stride == length)
      return named(NestKernel::kJoin, loops, *lanes, *dst_minor);
    if (lanes && loops[*lanes].src_stride == kWordBytes)
      return named(NestKernel::kRepack, loops, *lanes, *dst_minor);
  }
  if (packable && dst_minor && loops[*dst_minor].src_stride == kWordBytes) {
    return named(NestKernel::kPick, loops, *dst_minor, none);
  }
  if (src_minor && dst_minor && *src_minor != *dst_minor) {
    return named(NestKernel::kTranspose, loops, *src_minor, *dst_minor);
  }
  return named(NestKernel::kElements, loops, none - 1, none);
}

Shape shape_of(const CopyNest& nest) {
  std::vector<Loop> loops = nest.loops;
  for (Loop& loop : loops) {
    loop.src_stride /= 8;
    loop.dst_stride /= 8;
  }
  const std::uint64_t length = nest.length / 8;
  Shape shape;
  if (loops.empty()) {
    shape.kernel = NestKernel::kRuns;
  } else if (length >= kRunBytesMin) {
    // Short pieces want a long inner loop, which can look ahead.
    const auto longest = std::ranges::max_element(loops, {}, &Loop::count) - loops.begin();
    const std::size_t inner = length < kLookAheadBytes ? static_cast<std::size_t>(longest) : loops.size() - 1;
    shape = named(NestKernel::kRuns, loops, inner, loops.size());
  } else {
    shape = shape_of_small(loops, length);
  }
  if (shape.kernel == NestKernel::kTranspose) {
    const auto groups = find_loop(shape.outer, &Loop::dst_stride, shape.rows.count * shape.rows.dst_stride);
    if (groups) {
      shape.groups = shape.outer[*groups];
      shape.outer.erase(shape.outer.begin() + static_cast<std::ptrdiff_t>(*groups));
    }
  }
  if (!shape.outer.empty()) {
    shape.block = shape.outer.back();
    shape.outer.pop_back();
  }
  return shape;
}

// Calls body(dst offset, src offset) for every round of the loops.
template <typename Body>
void for_rounds(std::span<const Loop> loops, std::uint64_t dst, std::uint64_t src, Body& body) {
  if (loops.empty()) return body(dst, src);
  for (std::uint64_t i = 0; i < loops[0].count; ++i) {
    for_rounds(loops.subspan(1), dst + i * loops[0].dst_stride, src + i * loops[0].src_stride, body);
  }
}

bool rows_aligned(const std::byte* dst, const Shape& shape) {
  std::uint64_t all = reinterpret_cast<std::uintptr_t>(dst) | shape.block.dst_stride;
  if (shape.kernel == NestKernel::kSplit) all |= shape.rows.dst_stride;
  if (shape.kernel == NestKernel::kTranspose) all |= shape.lanes.dst_stride;
  for (const Loop& loop : shape.outer) all |= loop.dst_stride;
  return all % 64 == 0;
}

using Kernel = void (*)(const Shuffle&);

Kernel pick_kernel(NestKernel kernel, std::uint64_t length, const ShuffleKernels& k) {
  const bool two = length == 2;
  switch (kernel) {
    case NestKernel::kSplit:
      return two ? k.split_2x16 : k.split_4x8;
    case NestKernel::kJoin:
      return two ? k.join_2x16 : k.join_4x8;
    case NestKernel::kPick:
      return two ? k.pick_2x16 : k.pick_4x8;
    case NestKernel::kRepack:
      return two ? k.repack_2x16 : k.repack_4x8;
    case NestKernel::kTranspose:
      return length == 4 ? k.transpose_32 : nullptr;
    default:
      return nullptr;
  }
}

void apply_shuffle(std::byte* dst, const std::byte* src, const Shape& shape, Kernel kernel, Stores stores) {
  const bool split = shape.kernel == NestKernel::kSplit;
  Shuffle s{.dst = nullptr,
            .src = nullptr,
            .lanes = shape.lanes.count,
            .row_stride = split ? shape.rows.dst_stride : shape.rows.src_stride,
            .blocks = shape.block.count,
            .src_block_stride = shape.block.src_stride,
            .dst_block_stride = shape.block.dst_stride,
            .stores = rows_aligned(dst, shape) ? stores : Stores::kCached,
            .rows = shape.rows.count * shape.groups.count,
            .first_row = 0,
            .rows_per_group = shape.rows.count,
            .group_stride = shape.groups.src_stride,
            .lane_stride = shape.lanes.dst_stride};
  auto body = [&](std::uint64_t to, std::uint64_t from) {
    s.dst = dst + to;
    s.src = src + from;
    kernel(s);
  };
  for_rounds(shape.outer, 0, 0, body);
}

void apply_runs(std::byte* dst, const std::byte* src, const Shape& shape, std::uint64_t length,
                Stores stores) {
  auto body = [&](std::uint64_t to, std::uint64_t from) {
    copy_run(dst + to, src + from,
             {.src_offset = 0,
              .dst_offset = 0,
              .length = length,
              .count = shape.lanes.count,
              .src_stride = shape.lanes.src_stride,
              .dst_stride = shape.lanes.dst_stride},
             stores);
  };
  std::vector<Loop> outer = shape.outer;
  outer.push_back(shape.block);
  for_rounds(outer, 0, 0, body);
}

// dst[lane][row] = src[row][lane]: blocks of both dimensions, so that the lines of either side are used up.
template <std::size_t kLength>
void transpose(std::byte* dst, const std::byte* src, const Loop& lanes, const Loop& rows) {
  constexpr std::uint64_t kBlock = 64 / kLength < 8 ? 8 : 64 / kLength;
  for (std::uint64_t lane0 = 0; lane0 < lanes.count; lane0 += kBlock) {
    const std::uint64_t lane_end = std::min(lanes.count, lane0 + kBlock);
    for (std::uint64_t row0 = 0; row0 < rows.count; row0 += kBlock) {
      const std::uint64_t row_end = std::min(rows.count, row0 + kBlock);
      for (std::uint64_t lane = lane0; lane < lane_end; ++lane) {
        std::byte* to = dst + lane * lanes.dst_stride + row0 * kLength;
        const std::byte* from = src + lane * kLength + row0 * rows.src_stride;
        for (std::uint64_t row = row0; row < row_end; ++row, to += kLength, from += rows.src_stride) {
          std::memcpy(to, from, kLength);
        }
      }
    }
  }
}

template <std::size_t kLength>
void elements(std::byte* dst, const std::byte* src, const Loop& loop) {
  for (std::uint64_t i = 0; i < loop.count; ++i) {
    std::memcpy(dst + i * loop.dst_stride, src + i * loop.src_stride, kLength);
  }
}

// The two general loops for the small lengths that occur; others go through copy_run.
template <std::size_t kLength>
void apply_general(std::byte* dst, const std::byte* src, const Shape& shape) {
  auto body = [&](std::uint64_t to, std::uint64_t from) {
    if (shape.kernel == NestKernel::kTranspose)
      return transpose<kLength>(dst + to, src + from, shape.lanes, shape.rows);
    elements<kLength>(dst + to, src + from, shape.lanes);
  };
  std::vector<Loop> outer = shape.outer;
  outer.push_back(shape.block);
  outer.push_back(shape.groups);
  for_rounds(outer, 0, 0, body);
}

void apply_odd(std::byte* dst, const std::byte* src, const Shape& shape, std::uint64_t length) {
  Shape runs = shape;
  runs.outer.push_back(shape.groups);
  if (shape.kernel == NestKernel::kTranspose) runs.outer.push_back(shape.rows);
  apply_runs(dst, src, runs, length, Stores::kCached);
}

// Bit by byte: for packed elements that do not fill bytes.
void apply_bits(std::byte* dst, const std::byte* src, const CopyNest& nest) {
  auto body = [&](std::uint64_t to, std::uint64_t from) {
    for (std::uint64_t done = 0; done < nest.length;) {
      const std::uint64_t from_bit = (from + done) % 8, to_bit = (to + done) % 8;
      const std::uint64_t size = std::min({8 - from_bit, 8 - to_bit, nest.length - done});
      const auto mask = static_cast<unsigned>((1u << size) - 1);
      const unsigned value = (static_cast<unsigned>(src[(from + done) / 8]) >> from_bit) & mask;
      std::byte& target = dst[(to + done) / 8];
      target = std::byte((static_cast<unsigned>(target) & ~(mask << to_bit)) | (value << to_bit));
      done += size;
    }
  };
  for_rounds(nest.loops, nest.dst_offset, nest.src_offset, body);
}

}  // namespace

std::string_view kernel_name(NestKernel kernel) {
  constexpr std::array<std::string_view, 8> kNames{"runs",   "split",     "join",     "pick",
                                                   "repack", "transpose", "elements", "bits"};
  return kNames[static_cast<std::size_t>(kernel)];
}

NestKernel kernel_of(const CopyNest& nest) {
  return nest.in_bytes() ? shape_of(nest).kernel : NestKernel::kBits;
}

void apply_nest(std::byte* dst, const std::byte* src, const CopyNest& nest, const ShuffleKernels& kernels,
                Stores stores) {
  if (nest.length == 0) return;
  if (!nest.in_bytes()) return apply_bits(dst, src, nest);
  const Shape shape = shape_of(nest);
  const std::uint64_t length = nest.length / 8;
  dst += nest.dst_offset / 8;
  src += nest.src_offset / 8;
  if (shape.kernel == NestKernel::kRuns) return apply_runs(dst, src, shape, length, stores);
  if (const Kernel kernel = pick_kernel(shape.kernel, length, kernels)) {
    return apply_shuffle(dst, src, shape, kernel, stores);
  }
  switch (length) {
    case 1:
      return apply_general<1>(dst, src, shape);
    case 2:
      return apply_general<2>(dst, src, shape);
    case 4:
      return apply_general<4>(dst, src, shape);
    case 8:
      return apply_general<8>(dst, src, shape);
    default:
      return apply_odd(dst, src, shape, length);
  }
}

CopyNest piece_of(const CopyNest& nest, std::uint64_t piece, std::uint64_t num_pieces) {
  CopyNest out = nest;
  if (!nest.in_bytes()) {
    if (piece > 0) out.length = 0;
    return out;
  }
  // The outermost loop is cut where that gives enough pieces, else the one with the most rounds, or the piece
  // itself.
  auto longest = std::ranges::max_element(out.loops, {}, &Loop::count);
  if (!out.loops.empty() && out.loops[0].count >= num_pieces) longest = out.loops.begin();
  const std::uint64_t lines = nest.length / 512;
  const bool cut_length = longest == out.loops.end() || longest->count < lines;
  const std::uint64_t total = cut_length ? nest.length / 8 : longest->count;
  const auto at = [&](std::uint64_t i) {
    const std::uint64_t whole = total / num_pieces * i + total % num_pieces * i / num_pieces;
    return cut_length && i < num_pieces ? whole / 64 * 64 : whole;
  };
  const std::uint64_t begin = at(piece), size = at(piece + 1) - begin;
  if (cut_length) {
    out.src_offset += begin * 8;
    out.dst_offset += begin * 8;
    out.length = size * 8;
  } else {
    out.src_offset += begin * longest->src_stride;
    out.dst_offset += begin * longest->dst_stride;
    longest->count = size;
    if (size == 0) out.length = 0;
  }
  return out;
}

}  // namespace tpusync::layout
