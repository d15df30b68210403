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
  for (const PlanStep& step : steps) {
    for (const CopyNest& nest : step.nests) {
      std::byte* to = dst[step.dst].data();
      const std::byte* from = src[step.src].data();
      if (num_pieces == 1) {
        apply_nest(to, from, nest, kernels, stores);
      } else {
        apply_nest(to, from, piece_of(nest, piece, num_pieces), kernels, stores);
      }
    }
  }
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
