// What a fuzzer feeds to the two decoders of this room: text of layouts and bytes of plans. Aborts where a
// promise is broken; the sanitizers see to the rest.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>
#include <vector>

#include "tpusync/base/checksum.h"
#include "tpusync/layout/reshard.h"
#include "tpusync/layout/tiled_layout.h"

namespace tpusync::layout {

inline void check_that(bool promise) {
  if (!promise) std::abort();
}

// The text of any layout that is accepted gives an equal layout again, and its places stay inside its size.
inline void fuzz_text(std::string_view text) {
  const auto spec = parse_layout_spec(text);
  if (!spec) return;
  check_that(parse_layout_spec(to_text(*spec)).value() == *spec);
  Dims dims;
  for (std::size_t i = 0; i < spec->minor_to_major.size(); ++i)
    dims.push_back(1 + static_cast<std::int64_t>(i * 7 + text.size()) % 37);
  for (const DType& dtype : all_dtypes()) {
    const auto layout = TiledLayout::make(dtype, dims, *spec);
    if (!layout) continue;
    check_that(TiledLayout::parse(layout->text(), dtype, dims).value() == *layout);
    Dims last = dims;
    for (std::int64_t& index : last) --index;
    check_that(layout->offset_elements(last) < layout->padded_elements());
  }
}

// A plan that is accepted stays inside its buffers, whatever its bytes: it is applied to buffers of just its
// sizes.
inline void fuzz_plan(std::span<const std::byte> bytes) {
  constexpr std::uint64_t kBytesMax = 1
                                      << 16;  // of all buffers and of what is moved, so that a round is short
  const auto plan = decode_plan(bytes);
  if (!plan) return;
  const auto encoded = encode_plan(*plan);
  check_that(std::equal(encoded.begin(), encoded.end(), bytes.begin(), bytes.end()));
  std::uint64_t total = plan->moved_bits() / 8;
  for (const auto* sizes : {&plan->src_bytes, &plan->dst_bytes}) {
    for (const std::uint64_t size : *sizes) total += std::min(size, kBytesMax + 1);
  }
  if (total > kBytesMax) return;
  std::vector<std::vector<std::byte>> memory;
  std::vector<std::span<const std::byte>> src;
  std::vector<std::span<std::byte>> dst;
  for (const std::uint64_t size : plan->src_bytes) src.emplace_back(memory.emplace_back(size));
  for (const std::uint64_t size : plan->dst_bytes) dst.emplace_back(memory.emplace_back(size));
  base::SerialFor loop;
  for (const ShuffleKernels* kernels : shuffle_kernels())
    check_that(plan->apply(dst, src, loop, *kernels).has_value());
}

// The checksum of a plan would stop a fuzzer at the door: it is put right before the second try.
inline void fuzz_layout(std::span<const std::byte> data) {
  fuzz_text({reinterpret_cast<const char*>(data.data()), data.size()});
  fuzz_plan(data);
  constexpr std::size_t kChecksumBytes = 8;
  if (data.size() < kChecksumBytes) return;
  std::vector<std::byte> bytes(data.begin(), data.end());
  const std::uint64_t checksum = base::checksum64(std::span(bytes).first(bytes.size() - kChecksumBytes));
  const auto* of = reinterpret_cast<const std::byte*>(&checksum);
  std::copy(of, of + kChecksumBytes, bytes.end() - kChecksumBytes);
  fuzz_plan(bytes);
}

}  // namespace tpusync::layout
