#include "tpusync/layout/convert.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "tpusync/layout/apply_nest.h"

namespace tpusync::layout {

using base::Code;
using base::Result;
using base::Status;

namespace {

constexpr std::uint64_t kPieceBits = std::uint64_t{8} << 20;  // 1 MiB
constexpr std::uint64_t kStreamingBits =
    std::uint64_t{8} * (4 << 20);  // from 4 MiB on the caches are of no use

Status check_buffers(const TiledLayout& layout, std::span<const std::byte> tiled,
                     std::span<const std::byte> codes) {
  const std::uint64_t code_bytes = layout.num_elements() * (layout.dtype().storage_bits() / 8);
  if (tiled.size() != layout.padded_bytes()) {
    return base::fail(Code::kInvalid, fmt::format("layout {}: a buffer of {} bytes, must be {}",
                                                  layout.text(), tiled.size(), layout.padded_bytes()));
  }
  if (codes.size() != code_bytes) {
    return base::fail(Code::kInvalid, fmt::format("layout {}: codes of {} bytes, must be {}", layout.text(),
                                                  codes.size(), code_bytes));
  }
  if (tiled.data() < codes.data() + codes.size() && codes.data() < tiled.data() + tiled.size()) {
    return base::fail(Code::kInvalid, fmt::format("layout {}: the buffers overlap", layout.text()));
  }
  return {};
}

// The layout with elements of whole bytes, in the same order.
Result<TiledLayout> unpacked(const TiledLayout& layout) {
  LayoutSpec spec = layout.spec();
  spec.element_bits = 0;
  return TiledLayout::make(layout.dtype(), layout.dims(), std::move(spec));
}

bool is_packed(const TiledLayout& layout) {
  return layout.element_bits() < 8;
}

Box whole(const TiledLayout& layout) {
  return {Dims(layout.rank(), 0), layout.dims()};
}

void fill_elements(std::span<std::byte> bytes, std::uint64_t element_bytes, std::uint64_t value) {
  const auto* of = reinterpret_cast<const std::byte*>(&value);
  if (std::all_of(of, of + std::min<std::uint64_t>(8, element_bytes),
                  [&](std::byte b) { return b == of[0]; }) &&
      (element_bytes <= 8 || value == 0)) {
    std::memset(bytes.data(), static_cast<int>(of[0]), bytes.size());
    return;
  }
  std::vector<std::byte> element(element_bytes);
  std::memcpy(element.data(), of, std::min<std::uint64_t>(8, element_bytes));
  for (std::size_t at = 0; at < bytes.size(); ++at) bytes[at] = element[at % element_bytes];
}

// Neighbouring elements of one byte each move together into bytes, the first one lowest.
void pack(std::span<std::byte> packed, std::span<const std::byte> unpacked_bytes, unsigned bits) {
  const std::size_t per_byte = 8 / bits, mask = (1u << bits) - 1;
  for (std::size_t i = 0; i < packed.size(); ++i) {
    unsigned byte = 0;
    for (std::size_t j = 0; j < per_byte && i * per_byte + j < unpacked_bytes.size(); ++j) {
      byte |= (static_cast<unsigned>(unpacked_bytes[i * per_byte + j]) & mask) << (j * bits);
    }
    packed[i] = std::byte(byte);
  }
}

void unpack(std::span<std::byte> unpacked_bytes, std::span<const std::byte> packed, unsigned bits) {
  const std::size_t per_byte = 8 / bits, mask = (1u << bits) - 1;
  for (std::size_t i = 0; i < unpacked_bytes.size(); ++i) {
    const auto byte = static_cast<unsigned>(packed[i / per_byte]);
    unpacked_bytes[i] = std::byte((byte >> (i % per_byte * bits)) & mask);
  }
}

Result<std::vector<CopyNest>> plan_whole(const TiledLayout& dst, const TiledLayout& src) {
  return plan_box(dst, Dims(src.rank(), 0), src, whole(src));
}

}  // namespace

Status check_box(const TiledLayout& layout, const Box& box) {
  if (box.origin.size() != layout.rank() || box.extent.size() != layout.rank()) {
    return base::fail(Code::kInvalid,
                      fmt::format("layout {}: a box of rank {} and {} in an array of rank {}", layout.text(),
                                  box.origin.size(), box.extent.size(), layout.rank()));
  }
  for (std::size_t dim = 0; dim < layout.rank(); ++dim) {
    const std::int64_t origin = box.origin[dim], extent = box.extent[dim], size = layout.dims()[dim];
    if (origin < 0 || extent < 0 || origin > size || extent > size - origin) {
      return base::fail(Code::kInvalid,
                        fmt::format("layout {}: indices [{}, {} + {}) of dimension {} of size {}",
                                    layout.text(), origin, origin, extent, dim, size));
    }
  }
  return {};
}

Result<std::vector<CopyNest>> plan_box(const TiledLayout& dst, std::span<const std::int64_t> to,
                                       const TiledLayout& src, const Box& from) {
  TPUSYNC_TRY(check_box(src, from));
  TPUSYNC_TRY(check_box(dst, {Dims(to.begin(), to.end()), from.extent}));
  if (dst.element_bits() != src.element_bits()) {
    return base::fail(Code::kInvalid,
                      fmt::format("elements of {} bits in {} and of {} bits in {}", src.element_bits(),
                                  src.text(), dst.element_bits(), dst.text()));
  }
  std::vector<AxisCopy> axes;
  for (std::size_t dim = 0; dim < src.rank(); ++dim) {
    axes.push_back({.src = src.axis(dim),
                    .dst = dst.axis(dim),
                    .src_origin = static_cast<std::uint64_t>(from.origin[dim]),
                    .dst_origin = static_cast<std::uint64_t>(to[dim]),
                    .count = static_cast<std::uint64_t>(from.extent[dim])});
  }
  return nests_of(axes, src.element_bits());
}

void apply_nests(std::byte* dst, const std::byte* src, std::span<const CopyNest> nests,
                 base::ParallelFor& loop, const ShuffleKernels& kernels) {
  std::uint64_t bits = 0;
  for (const CopyNest& nest : nests) bits += nest.size_bits();
  const Stores stores = bits >= kStreamingBits ? Stores::kStreaming : Stores::kCached;
  const std::size_t pieces = std::min<std::uint64_t>(loop.width(), bits / kPieceBits + 1);
  loop.run(pieces, [&](std::size_t piece) {
    for (const CopyNest& nest : nests) {
      if (pieces == 1) {
        apply_nest(dst, src, nest, kernels, stores);
      } else {
        apply_nest(dst, src, piece_of(nest, piece, pieces), kernels, stores);
      }
    }
    streaming_fence();
  });
}

Status tile(const TiledLayout& layout, std::span<std::byte> tiled, std::span<const std::byte> codes,
            std::uint64_t fill, base::ParallelFor& loop, const ShuffleKernels& kernels) {
  TPUSYNC_TRY(check_buffers(layout, tiled, codes));
  const std::uint64_t bits = layout.dtype().bits;
  if (bits < 64 && fill >> bits != 0) {
    return base::fail(Code::kInvalid, fmt::format("fill {} does not fit {} bits", fill, bits));
  }
  const auto linear = TiledLayout::linear(layout.dtype(), layout.dims());
  const auto target = unpacked(layout);
  if (!linear || !target) return tl::unexpected(!linear ? linear.error() : target.error());
  const auto nests = plan_whole(*target, *linear);
  if (!nests) return tl::unexpected(nests.error());
  std::vector<std::byte> bytes(is_packed(layout) ? target->padded_bytes() : 0);
  const std::span<std::byte> out = is_packed(layout) ? std::span(bytes) : tiled;
  if (layout.padded_elements() != layout.num_elements()) fill_elements(out, target->element_bits() / 8, fill);
  apply_nests(out.data(), codes.data(), *nests, loop, kernels);
  if (is_packed(layout)) pack(tiled, bytes, static_cast<unsigned>(layout.element_bits()));
  return {};
}

Status untile(const TiledLayout& layout, std::span<std::byte> codes, std::span<const std::byte> tiled,
              base::ParallelFor& loop, const ShuffleKernels& kernels) {
  TPUSYNC_TRY(check_buffers(layout, tiled, codes));
  const auto linear = TiledLayout::linear(layout.dtype(), layout.dims());
  const auto source = unpacked(layout);
  if (!linear || !source) return tl::unexpected(!linear ? linear.error() : source.error());
  const auto nests = plan_whole(*linear, *source);
  if (!nests) return tl::unexpected(nests.error());
  std::vector<std::byte> bytes(is_packed(layout) ? source->padded_bytes() : 0);
  if (is_packed(layout)) unpack(bytes, tiled, static_cast<unsigned>(layout.element_bits()));
  apply_nests(codes.data(), is_packed(layout) ? bytes.data() : tiled.data(), *nests, loop, kernels);
  return {};
}

Status live_mask(const TiledLayout& layout, std::span<std::byte> mask) {
  if (mask.size() != layout.padded_bytes()) {
    return base::fail(Code::kInvalid, fmt::format("layout {}: a mask of {} bytes, must be {}", layout.text(),
                                                  mask.size(), layout.padded_bytes()));
  }
  const std::vector<std::byte> ones(layout.num_elements() * (layout.dtype().storage_bits() / 8),
                                    std::byte{0xFF});
  base::SerialFor loop;
  return tile(layout, mask, ones, 0, loop);
}

}  // namespace tpusync::layout
