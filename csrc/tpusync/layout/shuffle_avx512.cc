// The shuffles for processors with AVX-512 BW and VBMI: 64 bytes at a time, the rest as the others do it.
#include "tpusync/layout/shuffle.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <array>

#define TPUSYNC_AVX512 __attribute__((target("avx512f,avx512bw,avx512vbmi")))

namespace tpusync::layout {

namespace {

TPUSYNC_AVX512 inline __m512i load(const void* at) {
  return _mm512_loadu_si512(at);
}

template <Stores kStores>
TPUSYNC_AVX512 inline void store(std::byte* at, __m512i value) {
  if constexpr (kStores == Stores::kStreaming) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(at), value);
  } else {
    _mm512_storeu_si512(at, value);
  }
}

void finish(const Shuffle& s, std::size_t done, std::size_t dst_lane_bytes, std::size_t src_lane_bytes,
            void (*other)(const Shuffle&)) {
  if (done == s.lanes) return;
  Shuffle rest = s;
  rest.dst += done * dst_lane_bytes;
  rest.src += done * src_lane_bytes;
  rest.lanes -= done;
  rest.stores = Stores::kCached;
  other(rest);
}

// Element i of the result is element order[i] of two registers side by side.
template <typename T, typename F>
constexpr auto order_of(F&& at) {
  std::array<T, 64 / sizeof(T)> order{};
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<T>(at(i));
  return order;
}

alignas(64) constexpr auto kEven16 = order_of<std::uint16_t>([](std::size_t i) { return 2 * i; });
alignas(64) constexpr auto kOdd16 = order_of<std::uint16_t>([](std::size_t i) { return 2 * i + 1; });
alignas(64) constexpr auto kZipLow16 = order_of<std::uint16_t>([](std::size_t i) {
  return i / 2 + i % 2 * 32;
});
alignas(64) constexpr auto kZipHigh16 = order_of<std::uint16_t>([](std::size_t i) {
  return 16 + i / 2 + i % 2 * 32;
});
alignas(64) constexpr auto kEven8 = order_of<std::uint8_t>([](std::size_t i) { return 2 * i; });
alignas(64) constexpr auto kOdd8 = order_of<std::uint8_t>([](std::size_t i) { return 2 * i + 1; });
alignas(64) constexpr auto kZipLow8 = order_of<std::uint8_t>([](std::size_t i) {
  return i / 2 + i % 2 * 64;
});
alignas(64) constexpr auto kZipHigh8 = order_of<std::uint8_t>([](std::size_t i) {
  return 32 + i / 2 + i % 2 * 64;
});

template <Stores kStores>
TPUSYNC_AVX512 void split_2x16(const Shuffle& s) {
  const std::size_t whole = s.lanes / 32 * 32;
  const __m512i even = load(kEven16.data()), odd = load(kOdd16.data());
  for (std::size_t block = 0; block < s.blocks; ++block) {
    const std::byte* src = s.src + block * s.src_block_stride;
    std::byte* dst = s.dst + block * s.dst_block_stride;
    for (std::size_t lane = 0; lane < whole; lane += 32) {
      const __m512i a = load(src + lane * 4), b = load(src + lane * 4 + 64);
      store<kStores>(dst + lane * 2, _mm512_permutex2var_epi16(a, even, b));
      store<kStores>(dst + s.row_stride + lane * 2, _mm512_permutex2var_epi16(a, odd, b));
    }
  }
  finish(s, whole, 2, 4, avx2_kernels().split_2x16);
}

template <Stores kStores>
TPUSYNC_AVX512 void join_2x16(const Shuffle& s) {
  const std::size_t whole = s.lanes / 32 * 32;
  const __m512i low = load(kZipLow16.data()), high = load(kZipHigh16.data());
  for (std::size_t block = 0; block < s.blocks; ++block) {
    const std::byte* src = s.src + block * s.src_block_stride;
    std::byte* dst = s.dst + block * s.dst_block_stride;
    for (std::size_t lane = 0; lane < whole; lane += 32) {
      const __m512i a = load(src + lane * 2), b = load(src + s.row_stride + lane * 2);
      store<kStores>(dst + lane * 4, _mm512_permutex2var_epi16(a, low, b));
      store<kStores>(dst + lane * 4 + 64, _mm512_permutex2var_epi16(a, high, b));
    }
  }
  finish(s, whole, 4, 2, avx2_kernels().join_2x16);
}

template <Stores kStores>
TPUSYNC_AVX512 void repack_2x16(const Shuffle& s) {
  const std::size_t whole = s.lanes == 0 ? 0 : (s.lanes - 1) / 16 * 16;  // a row ends with its last element
  for (std::size_t block = 0; block < s.blocks; ++block) {
    const std::byte* src = s.src + block * s.src_block_stride;
    std::byte* dst = s.dst + block * s.dst_block_stride;
    for (std::size_t lane = 0; lane < whole; lane += 16) {
      const __m512i a = load(src + lane * 4), b = load(src + s.row_stride + lane * 4);
      store<kStores>(dst + lane * 4,
                     _mm512_mask_blend_epi16(0xAAAAAAAA, a, _mm512_maskz_slli_epi32(0xFFFF, b, 16)));
    }
  }
  finish(s, whole, 4, 4, avx2_kernels().repack_2x16);
}

template <Stores kStores>
TPUSYNC_AVX512 void split_4x8(const Shuffle& s) {
  const std::size_t whole = s.lanes / 64 * 64;
  const __m512i even = load(kEven8.data()), odd = load(kOdd8.data());
  for (std::size_t block = 0; block < s.blocks; ++block) {
    const std::byte* src = s.src + block * s.src_block_stride;
    std::byte* dst = s.dst + block * s.dst_block_stride;
    for (std::size_t lane = 0; lane < whole; lane += 64) {
      const __m512i a = load(src + lane * 4), b = load(src + lane * 4 + 64);
      const __m512i c = load(src + lane * 4 + 128), d = load(src + lane * 4 + 192);
      const __m512i ab02 = _mm512_permutex2var_epi8(a, even, b), ab13 = _mm512_permutex2var_epi8(a, odd, b);
      const __m512i cd02 = _mm512_permutex2var_epi8(c, even, d), cd13 = _mm512_permutex2var_epi8(c, odd, d);
      store<kStores>(dst + lane, _mm512_permutex2var_epi8(ab02, even, cd02));
      store<kStores>(dst + s.row_stride + lane, _mm512_permutex2var_epi8(ab13, even, cd13));
      store<kStores>(dst + 2 * s.row_stride + lane, _mm512_permutex2var_epi8(ab02, odd, cd02));
      store<kStores>(dst + 3 * s.row_stride + lane, _mm512_permutex2var_epi8(ab13, odd, cd13));
    }
  }
  finish(s, whole, 1, 4, avx2_kernels().split_4x8);
}

template <Stores kStores>
TPUSYNC_AVX512 void join_4x8(const Shuffle& s) {
  const std::size_t whole = s.lanes / 64 * 64;
  const __m512i low8 = load(kZipLow8.data()), high8 = load(kZipHigh8.data());
  const __m512i low16 = load(kZipLow16.data()), high16 = load(kZipHigh16.data());
  for (std::size_t block = 0; block < s.blocks; ++block) {
    const std::byte* src = s.src + block * s.src_block_stride;
    std::byte* dst = s.dst + block * s.dst_block_stride;
    for (std::size_t lane = 0; lane < whole; lane += 64) {
      const __m512i a = load(src + lane), b = load(src + s.row_stride + lane);
      const __m512i c = load(src + 2 * s.row_stride + lane), d = load(src + 3 * s.row_stride + lane);
      const __m512i ab_low = _mm512_permutex2var_epi8(a, low8, b),
                    ab_high = _mm512_permutex2var_epi8(a, high8, b);
      const __m512i cd_low = _mm512_permutex2var_epi8(c, low8, d),
                    cd_high = _mm512_permutex2var_epi8(c, high8, d);
      store<kStores>(dst + lane * 4, _mm512_permutex2var_epi16(ab_low, low16, cd_low));
      store<kStores>(dst + lane * 4 + 64, _mm512_permutex2var_epi16(ab_low, high16, cd_low));
      store<kStores>(dst + lane * 4 + 128, _mm512_permutex2var_epi16(ab_high, low16, cd_high));
      store<kStores>(dst + lane * 4 + 192, _mm512_permutex2var_epi16(ab_high, high16, cd_high));
    }
  }
  finish(s, whole, 4, 1, avx2_kernels().join_4x8);
}

template <void (*kCached)(const Shuffle&), void (*kStreaming)(const Shuffle&)>
void by_stores(const Shuffle& s) {
  (s.stores == Stores::kStreaming ? kStreaming : kCached)(s);
}

constexpr Stores kC = Stores::kCached, kS = Stores::kStreaming;

}  // namespace

const ShuffleKernels& avx512_kernels() {
  static const ShuffleKernels kernels = [] {
    ShuffleKernels k = avx2_kernels();
    k.name = "avx512";
    k.split_2x16 = &by_stores<&split_2x16<kC>, &split_2x16<kS>>;
    k.join_2x16 = &by_stores<&join_2x16<kC>, &join_2x16<kS>>;
    k.repack_2x16 = &by_stores<&repack_2x16<kC>, &repack_2x16<kS>>;
    k.split_4x8 = &by_stores<&split_4x8<kC>, &split_4x8<kS>>;
    k.join_4x8 = &by_stores<&join_4x8<kC>, &join_4x8<kS>>;
    return k;
  }();
  return kernels;
}

}  // namespace tpusync::layout
#endif
