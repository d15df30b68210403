// The shuffles for processors with AVX2: 32 bytes at a time, the rest of a row as the portable ones do it.
#include "tpusync/layout/shuffle.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define TPUSYNC_AVX2 __attribute__((target("avx2")))

namespace tpusync::layout {

namespace {

TPUSYNC_AVX2 inline __m256i load(const std::byte* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

template <Stores kStores>
TPUSYNC_AVX2 inline void store(std::byte* at, __m256i value) {
  if constexpr (kStores == Stores::kStreaming) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(at), value);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), value);
  }
}

// Lanes of the rest that the portable kernel does, from `done` on, in every block.
void finish(const Shuffle& s, std::size_t done, std::size_t dst_lane_bytes, std::size_t src_lane_bytes,
            void (*portable)(const Shuffle&)) {
  if (done == s.lanes) return;
  Shuffle rest = s;
  rest.dst += done * dst_lane_bytes;
  rest.src += done * src_lane_bytes;
  rest.lanes -= done;
  portable(rest);
}

// The 16-bit halves of 16 words, low ones and high ones, in order.
struct Halves {
  __m256i low, high;
};

TPUSYNC_AVX2 inline Halves halves(__m256i a, __m256i b) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                         0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  a = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(a, order), 0xD8);
  b = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(b, order), 0xD8);
  return {_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31)};
}

template <Stores kStores>
TPUSYNC_AVX2 void split_2x16(const Shuffle& s) {
  const std::size_t whole = s.lanes / 16 * 16;
  for (std::size_t block = 0; block < s.blocks; ++block) {
    const std::byte* src = s.src + block * s.src_block_stride;
    std::byte* dst = s.dst + block * s.dst_block_stride;
    for (std::size_t lane = 0; lane < whole; lane += 16) {
      const Halves h = halves(load(src + lane * 4), load(src + lane * 4 + 32));
      store<kStores>(dst + lane * 2, h.low);
      store<kStores>(dst + s.row_stride + lane * 2, h.high);
    }
  }
  finish(s, whole, 2, 4, portable_kernels().split_2x16);
}

template <Stores kStores>
TPUSYNC_AVX2 void join_2x16(const Shuffle& s) {
  const std::size_t whole = s.lanes / 16 * 16;
  for (std::size_t block = 0; block < s.blocks; ++block) {
    const std::byte* src = s.src + block * s.src_block_stride;
    std::byte* dst = s.dst + block * s.dst_block_stride;
    for (std::size_t lane = 0; lane < whole; lane += 16) {
      const __m256i a = load(src + lane * 2), b = load(src + s.row_stride + lane * 2);
      const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
      store<kStores>(dst + lane * 4, _mm256_permute2x128_si256(low, high, 0x20));
      store<kStores>(dst + lane * 4 + 32, _mm256_permute2x128_si256(low, high, 0x31));
    }
  }
  finish(s, whole, 4, 2, portable_kernels().join_2x16);
}

// Lanes that may be read as whole vectors although a row ends with its last element, not with its last word.
std::size_t readable(std::size_t lanes, std::size_t step) {
  return lanes == 0 ? 0 : (lanes - 1) / step * step;
}

template <Stores kStores>
TPUSYNC_AVX2 void pick_2x16(const Shuffle& s) {
  const std::size_t whole = readable(s.lanes, 16);
  const __m256i mask = _mm256_set1_epi32(0xFFFF);
  for (std::size_t block = 0; block < s.blocks; ++block) {
    const std::byte* src = s.src + block * s.src_block_stride;
    std::byte* dst = s.dst + block * s.dst_block_stride;
    for (std::size_t lane = 0; lane < whole; lane += 16) {
      const __m256i a = _mm256_and_si256(load(src + lane * 4), mask);
      const __m256i b = _mm256_and_si256(load(src + lane * 4 + 32), mask);
      store<kStores>(dst + lane * 2, _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xD8));
    }
  }
  finish(s, whole, 2, 4, portable_kernels().pick_2x16);
}

template <Stores kStores>
TPUSYNC_AVX2 void repack_2x16(const Shuffle& s) {
  const std::size_t whole = readable(s.lanes, 8);
  for (std::size_t block = 0; block < s.blocks; ++block) {
    const std::byte* src = s.src + block * s.src_block_stride;
    std::byte* dst = s.dst + block * s.dst_block_stride;
    for (std::size_t lane = 0; lane < whole; lane += 8) {
      __builtin_prefetch(src + s.src_block_stride + lane * 4);
      __builtin_prefetch(src + s.src_block_stride + s.row_stride + lane * 4);
      const __m256i a = load(src + lane * 4), b = load(src + s.row_stride + lane * 4);
      store<kStores>(dst + lane * 4, _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xAA));
    }
  }
  finish(s, whole, 4, 4, portable_kernels().repack_2x16);
}

// The four bytes of 8 words each, byte 0 of all first: 8 bytes of row 0, of row 1, of row 2, of row 3.
TPUSYNC_AVX2 inline __m256i quarters(__m256i words) {
  const __m256i order = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,  //
                                         0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(words, order),
                                     _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

template <Stores kStores>
TPUSYNC_AVX2 void split_4x8(const Shuffle& s) {
  const std::size_t whole = s.lanes / 32 * 32;
  for (std::size_t block = 0; block < s.blocks; ++block) {
    const std::byte* src = s.src + block * s.src_block_stride;
    std::byte* dst = s.dst + block * s.dst_block_stride;
    for (std::size_t lane = 0; lane < whole; lane += 32) {
      const __m256i a = quarters(load(src + lane * 4)), b = quarters(load(src + lane * 4 + 32));
      const __m256i c = quarters(load(src + lane * 4 + 64)), d = quarters(load(src + lane * 4 + 96));
      const __m256i ab02 = _mm256_unpacklo_epi64(a, b), ab13 = _mm256_unpackhi_epi64(a, b);
      const __m256i cd02 = _mm256_unpacklo_epi64(c, d), cd13 = _mm256_unpackhi_epi64(c, d);
      store<kStores>(dst + lane, _mm256_permute2x128_si256(ab02, cd02, 0x20));
      store<kStores>(dst + s.row_stride + lane, _mm256_permute2x128_si256(ab13, cd13, 0x20));
      store<kStores>(dst + 2 * s.row_stride + lane, _mm256_permute2x128_si256(ab02, cd02, 0x31));
      store<kStores>(dst + 3 * s.row_stride + lane, _mm256_permute2x128_si256(ab13, cd13, 0x31));
    }
  }
  finish(s, whole, 1, 4, portable_kernels().split_4x8);
}

template <Stores kStores>
TPUSYNC_AVX2 void join_4x8(const Shuffle& s) {
  const std::size_t whole = s.lanes / 32 * 32;
  for (std::size_t block = 0; block < s.blocks; ++block) {
    const std::byte* src = s.src + block * s.src_block_stride;
    std::byte* dst = s.dst + block * s.dst_block_stride;
    for (std::size_t lane = 0; lane < whole; lane += 32) {
      const __m256i a = load(src + lane), b = load(src + s.row_stride + lane);
      const __m256i c = load(src + 2 * s.row_stride + lane), d = load(src + 3 * s.row_stride + lane);
      const __m256i ab_low = _mm256_unpacklo_epi8(a, b), ab_high = _mm256_unpackhi_epi8(a, b);
      const __m256i cd_low = _mm256_unpacklo_epi8(c, d), cd_high = _mm256_unpackhi_epi8(c, d);
      const __m256i w0 = _mm256_unpacklo_epi16(ab_low, cd_low), w1 = _mm256_unpackhi_epi16(ab_low, cd_low);
      const __m256i w2 = _mm256_unpacklo_epi16(ab_high, cd_high),
                    w3 = _mm256_unpackhi_epi16(ab_high, cd_high);
      store<kStores>(dst + lane * 4, _mm256_permute2x128_si256(w0, w1, 0x20));
      store<kStores>(dst + lane * 4 + 32, _mm256_permute2x128_si256(w2, w3, 0x20));
      store<kStores>(dst + lane * 4 + 64, _mm256_permute2x128_si256(w0, w1, 0x31));
      store<kStores>(dst + lane * 4 + 96, _mm256_permute2x128_si256(w2, w3, 0x31));
    }
  }
  finish(s, whole, 4, 1, portable_kernels().join_4x8);
}

template <Stores kStores>
TPUSYNC_AVX2 void pick_4x8(const Shuffle& s) {
  const std::size_t whole = readable(s.lanes, 32);
  const __m256i mask = _mm256_set1_epi32(0xFF);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (std::size_t block = 0; block < s.blocks; ++block) {
    const std::byte* src = s.src + block * s.src_block_stride;
    std::byte* dst = s.dst + block * s.dst_block_stride;
    for (std::size_t lane = 0; lane < whole; lane += 32) {
      const __m256i a = _mm256_and_si256(load(src + lane * 4), mask);
      const __m256i b = _mm256_and_si256(load(src + lane * 4 + 32), mask);
      const __m256i c = _mm256_and_si256(load(src + lane * 4 + 64), mask);
      const __m256i d = _mm256_and_si256(load(src + lane * 4 + 96), mask);
      const __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
      store<kStores>(dst + lane, _mm256_permutevar8x32_epi32(bytes, order));
    }
  }
  finish(s, whole, 1, 4, portable_kernels().pick_4x8);
}

template <Stores kStores>
TPUSYNC_AVX2 void repack_4x8(const Shuffle& s) {
  const std::size_t whole = readable(s.lanes, 8);
  const __m256i mask = _mm256_set1_epi32(0xFF);
  for (std::size_t block = 0; block < s.blocks; ++block) {
    const std::byte* src = s.src + block * s.src_block_stride;
    std::byte* dst = s.dst + block * s.dst_block_stride;
    for (std::size_t lane = 0; lane < whole; lane += 8) {
      const __m256i a = _mm256_and_si256(load(src + lane * 4), mask);
      const __m256i b = _mm256_and_si256(load(src + s.row_stride + lane * 4), mask);
      const __m256i c = _mm256_and_si256(load(src + 2 * s.row_stride + lane * 4), mask);
      const __m256i d = load(src + 3 * s.row_stride + lane * 4);
      const __m256i ab = _mm256_or_si256(a, _mm256_slli_epi32(b, 8));
      const __m256i cd = _mm256_or_si256(_mm256_slli_epi32(c, 16), _mm256_slli_epi32(d, 24));
      store<kStores>(dst + lane * 4, _mm256_or_si256(ab, cd));
    }
  }
  finish(s, whole, 4, 4, portable_kernels().repack_4x8);
}

// Word j of row i of eight rows becomes word i of row j.
TPUSYNC_AVX2 inline void transpose_8x8(__m256i (&r)[8]) {
  __m256i t[8], u[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    u[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    u[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
  }
}

// 16 rows by 8 lanes at a time, a whole line of every lane of dst, and many rows of one lane before the next:
// each lane of dst is a place of its own in memory, which likes to be written in longer stretches.
template <Stores kStores>
TPUSYNC_AVX2 void transpose_32(const Shuffle& s) {
  constexpr std::size_t kRowBlock = 128;
  const std::size_t rows = s.first_row + (s.rows - s.first_row) / 16 * 16, lanes = s.lanes / 8 * 8;
  for (std::size_t block = 0; block < s.blocks; ++block) {
    const std::byte* src = s.src + block * s.src_block_stride;
    std::byte* dst = s.dst + block * s.dst_block_stride;
    for (std::size_t row0 = s.first_row; row0 < rows; row0 += kRowBlock) {
      const std::size_t num_rows = row0 + kRowBlock < rows ? kRowBlock : rows - row0;
      const std::byte* from[kRowBlock];
      for (std::size_t i = 0; i < num_rows; ++i) from[i] = src + s.row_offset(row0 + i);
      for (std::size_t lane = 0; lane < lanes; lane += 8) {
        std::byte* to = dst + lane * s.lane_stride + row0 * 4;
        for (std::size_t row = 0; row < num_rows; row += 16) {
          __m256i low[8], high[8];
          for (std::size_t i = 0; i < 8; ++i) {
            low[i] = load(from[row + i] + lane * 4);
            high[i] = load(from[row + 8 + i] + lane * 4);
          }
          transpose_8x8(low);
          transpose_8x8(high);
          for (std::size_t i = 0; i < 8; ++i) {
            store<kStores>(to + i * s.lane_stride + row * 4, low[i]);
            store<kStores>(to + i * s.lane_stride + row * 4 + 32, high[i]);
          }
        }
      }
    }
  }
  Shuffle right = s;  // the lanes that are left, then the rows that are left of the others
  right.src += lanes * 4;
  right.dst += lanes * s.lane_stride;
  right.lanes -= lanes;
  portable_kernels().transpose_32(right);
  Shuffle below = s;
  below.first_row = rows;
  below.lanes = lanes;
  portable_kernels().transpose_32(below);
}

template <void (*kCached)(const Shuffle&), void (*kStreaming)(const Shuffle&)>
void by_stores(const Shuffle& s) {
  (s.stores == Stores::kStreaming ? kStreaming : kCached)(s);
}

constexpr Stores kC = Stores::kCached, kS = Stores::kStreaming;
constexpr ShuffleKernels kAvx2{
    .name = "avx2",
    .split_2x16 = &by_stores<&split_2x16<kC>, &split_2x16<kS>>,
    .join_2x16 = &by_stores<&join_2x16<kC>, &join_2x16<kS>>,
    .pick_2x16 = &by_stores<&pick_2x16<kC>, &pick_2x16<kS>>,
    .repack_2x16 = &by_stores<&repack_2x16<kC>, &repack_2x16<kS>>,
    .split_4x8 = &by_stores<&split_4x8<kC>, &split_4x8<kS>>,
    .join_4x8 = &by_stores<&join_4x8<kC>, &join_4x8<kS>>,
    .pick_4x8 = &by_stores<&pick_4x8<kC>, &pick_4x8<kS>>,
    .repack_4x8 = &by_stores<&repack_4x8<kC>, &repack_4x8<kS>>,
    .transpose_32 = &by_stores<&transpose_32<kC>, &transpose_32<kS>>,
};

}  // namespace

const ShuffleKernels& avx2_kernels() {
  return kAvx2;
}

}  // namespace tpusync::layout
#endif
