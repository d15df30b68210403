#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "tpusync/layout/apply_nest.h"
#include "tpusync/layout/reshard.h"

namespace tpusync::layout {

using base::Code;
using base::Status;

namespace {

constexpr std::uint64_t kPieceBits = std::uint64_t{8} << 20;  // 1 MiB, for threads to share out
constexpr std::uint64_t kStreamingBits = std::uint64_t{8} * (4 << 20);

void zero(std::byte* at, const CopyRun& run) {
  for (std::uint64_t i = 0; i < run.count; ++i)
    std::memset(at + run.dst_offset + i * run.dst_stride, 0, run.length);
}

bool overlap(const std::byte* a, std::size_t a_size, const std::byte* b, std::size_t b_size) {
  return a < b + b_size && b < a + a_size;
}

// A nest of a step, or the piece of it whose turn it is.
struct Move {
  std::byte* dst;
  const std::byte* src;
  std::uint32_t src_number;
  CopyNest nest;
  const CopyNest* whole;
};

constexpr std::uint64_t kRowBitsMin =
    std::uint64_t{8} * 256;  // shorter ones are better off in a loop of their own

// True where `nest` takes as long a stretch as `last` out of the same rows of the same source: heads that go
// to several ranks.
bool read_same_rows(const Move& last, const PlanStep& step, const CopyNest& nest) {
  const CopyNest& a = *last.whole;
  if (step.src != last.src_number || a.loops.size() != 1 || nest.loops.size() != 1) return false;
  const std::uint64_t apart =
      std::max(a.src_offset, nest.src_offset) - std::min(a.src_offset, nest.src_offset);
  return a.loops[0].count == nest.loops[0].count && a.loops[0].src_stride == nest.loops[0].src_stride &&
         a.length == nest.length && nest.length >= kRowBitsMin && apart < nest.loops[0].src_stride &&
         a.in_bytes() && nest.in_bytes();
}

// Moves that read the same rows go row by row, so that the source is read once from front to back and not
// once per destination with gaps in between. Leaves `moves` empty.
void apply_moves(std::vector<Move>& moves, const ShuffleKernels& kernels, Stores stores) {
  const bool rows = moves.size() > 1 && moves[0].nest.length > 0 && moves[0].nest.loops.size() == 1;
  if (!rows) {
    for (const Move& move : moves) apply_nest(move.dst, move.src, move.nest, kernels, stores);
  }
  for (std::uint64_t row = 0; rows && row < moves[0].nest.loops[0].count; ++row) {
    for (const Move& move : moves) {
      const Loop& loop = move.nest.loops[0];
      copy_run(move.dst, move.src,
               {.src_offset = (move.nest.src_offset + row * loop.src_stride) / 8,
                .dst_offset = (move.nest.dst_offset + row * loop.dst_stride) / 8,
                .length = move.nest.length / 8},
               stores);
    }
  }
  moves.clear();
}

}  // namespace

std::uint64_t ReshardPlan::moved_bits() const {
  std::uint64_t bits = 0;
  for (const PlanStep& step : steps) {
    for (const CopyNest& nest : step.nests) bits += nest.size_bits();
  }
  return bits;
}

Status ReshardPlan::check(std::span<const std::span<std::byte>> dst,
                          std::span<const std::span<const std::byte>> src) const {
  if (dst.size() != dst_bytes.size() || src.size() != src_bytes.size()) {
    return base::fail(Code::kInvalid,
                      fmt::format("plan for {} to {} buffers, given {} to {}", src_bytes.size(),
                                  dst_bytes.size(), src.size(), dst.size()));
  }
  for (std::size_t i = 0; i < src.size(); ++i) {
    if (src[i].size() == src_bytes[i]) continue;
    return base::fail(Code::kInvalid,
                      fmt::format("source {} has {} bytes, must have {}", i, src[i].size(), src_bytes[i]));
  }
  for (std::size_t i = 0; i < dst.size(); ++i) {
    if (dst[i].size() != dst_bytes[i]) {
      return base::fail(Code::kInvalid, fmt::format("destination {} has {} bytes, must have {}", i,
                                                    dst[i].size(), dst_bytes[i]));
    }
    for (std::size_t j = 0; j < src.size(); ++j) {
      if (overlap(dst[i].data(), dst[i].size(), src[j].data(), src[j].size())) {
        return base::fail(Code::kInvalid, fmt::format("destination {} overlaps source {}", i, j));
      }
    }
    for (std::size_t j = 0; j < i; ++j) {
      if (overlap(dst[i].data(), dst[i].size(), dst[j].data(), dst[j].size())) {
        return base::fail(Code::kInvalid, fmt::format("destinations {} and {} overlap", j, i));
      }
    }
  }
  return {};
}

void ReshardPlan::apply_piece(std::span<const std::span<std::byte>> dst,
                              std::span<const std::span<const std::byte>> src, std::size_t piece,
                              std::size_t num_pieces, const ShuffleKernels& kernels) const {
  if (piece == 0) {
    for (std::size_t i = 0; i < dst.size(); ++i) {
      for (const CopyRun& run : dst_padding[i]) zero(dst[i].data(), run);
    }
  }
  copy_piece(dst, src, piece, num_pieces, kernels);
}

void ReshardPlan::copy_piece(std::span<const std::span<std::byte>> dst,
                             std::span<const std::span<const std::byte>> src, std::size_t piece,
                             std::size_t num_pieces, const ShuffleKernels& kernels) const {
  const Stores stores = moved_bits() >= kStreamingBits ? Stores::kStreaming : Stores::kCached;
  std::vector<Move> moves;
  for (const PlanStep& step : steps) {
    for (const CopyNest& nest : step.nests) {
      if (!moves.empty() && !read_same_rows(moves.back(), step, nest)) apply_moves(moves, kernels, stores);
      moves.push_back({.dst = dst[step.dst].data(),
                       .src = src[step.src].data(),
                       .src_number = step.src,
                       .nest = num_pieces == 1 ? nest : piece_of(nest, piece, num_pieces),
                       .whole = &nest});
    }
  }
  apply_moves(moves, kernels, stores);
  streaming_fence();
}

Status ReshardPlan::apply(std::span<const std::span<std::byte>> dst,
                          std::span<const std::span<const std::byte>> src, base::ParallelFor& loop,
                          const ShuffleKernels& kernels) const {
  TPUSYNC_TRY(check(dst, src));
  // Padding first: where it is a whole buffer, elements are written over it.
  loop.run(dst.size(), [&](std::size_t i) {
    for (const CopyRun& run : dst_padding[i]) zero(dst[i].data(), run);
  });
  // Small pieces, so that what several shards take from one place is still in the caches for the last of
  // them.
  const std::size_t pieces = std::max<std::uint64_t>(1, moved_bits() / kPieceBits);
  loop.run(pieces, [&](std::size_t piece) { copy_piece(dst, src, piece, pieces, kernels); });
  return {};
}

std::string ReshardPlan::describe() const {
  std::string out = fmt::format("{} sources, {} destinations, {} bytes moved\n", src_bytes.size(),
                                dst_bytes.size(), (moved_bits() + 7) / 8);
  for (const PlanStep& step : steps) {
    std::array<std::uint64_t, 8> bits_by_kernel{};
    std::uint64_t smallest = UINT64_MAX;
    for (const CopyNest& nest : step.nests) {
      bits_by_kernel[static_cast<std::size_t>(kernel_of(nest))] += nest.size_bits();
      smallest = std::min(smallest, nest.length);
    }
    out += fmt::format("{} -> {}:", step.src, step.dst);
    for (std::size_t k = 0; k < bits_by_kernel.size(); ++k) {
      if (bits_by_kernel[k] == 0) continue;
      out +=
          fmt::format(" {} {} bytes", kernel_name(static_cast<NestKernel>(k)), (bits_by_kernel[k] + 7) / 8);
    }
    out += fmt::format(", {} loops, pieces of {} bytes and more\n", step.nests.size(), smallest / 8);
  }
  return out;
}

}  // namespace tpusync::layout
