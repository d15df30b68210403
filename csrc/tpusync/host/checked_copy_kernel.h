// The inner loop of checked_copy.cc, compiled once per instruction set: each including file names its own
// namespace in TPUSYNC_KERNEL and selects its instructions before the include; with TPUSYNC_STREAM it has
// those of AVX for 32 bytes.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tpusync::host::TPUSYNC_KERNEL {

// What was copied is read again, not its source, which may have changed meanwhile.
inline void forget_where_it_came_from() {
  asm volatile("" ::: "memory");
}

#if defined(TPUSYNC_STREAM)
constexpr std::size_t kChunkBytes = 2048;  // one staged and one fetched ahead stay in the first-level cache
constexpr std::size_t kLineBytes = 64;
constexpr std::size_t kVectorBytes = 32;

// From memory to the staging and, past the caches, to `to`, out of the same registers: the sum is that of the
// bytes that were delivered, whoever writes to `from` meanwhile. `to` lies on a vector's boundary.
inline void copy_twice(std::byte* to, std::byte* staging, const std::byte* from, std::size_t num_lines) {
  for (std::size_t at = 0; at < num_lines * kLineBytes; at += kLineBytes) {
    _mm_prefetch(reinterpret_cast<const char*>(from + at + kChunkBytes), _MM_HINT_T0);
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at + kVectorBytes));
    _mm256_store_si256(reinterpret_cast<__m256i*>(staging + at), a);
    _mm256_store_si256(reinterpret_cast<__m256i*>(staging + at + kVectorBytes), b);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at + kVectorBytes), b);
  }
}

inline void copy_and_sum(XXH3_state_t* xxh, std::byte* to, const std::byte* from, std::size_t num_bytes) {
  alignas(kLineBytes) std::byte staging[kChunkBytes];
  // The way to the first boundary, without streaming; later chunks begin on one.
  const std::size_t skew = -reinterpret_cast<std::uintptr_t>(to) % kVectorBytes;
  while (num_bytes > 0) {
    const bool is_skewed = reinterpret_cast<std::uintptr_t>(to) % kVectorBytes != 0;
    std::size_t chunk_bytes = num_bytes < kChunkBytes ? num_bytes : kChunkBytes;
    if (is_skewed && skew < chunk_bytes) chunk_bytes = skew;
    const std::size_t num_lines = is_skewed ? 0 : chunk_bytes / kLineBytes, streamed = num_lines * kLineBytes;
    copy_twice(to, staging, from, num_lines);
    if (streamed < chunk_bytes) {
      std::memcpy(staging + streamed, from + streamed, chunk_bytes - streamed);
      forget_where_it_came_from();
      std::memcpy(to + streamed, staging + streamed, chunk_bytes - streamed);
    }
    XXH3_64bits_update(xxh, staging, chunk_bytes);
    to += chunk_bytes;
    from += chunk_bytes;
    num_bytes -= chunk_bytes;
  }
  _mm_sfence();  // whoever learns that the copy is done finds it in memory
}
#else
constexpr std::size_t kChunkBytes = 4096;  // in the first-level cache, twice over

inline void copy_and_sum(XXH3_state_t* xxh, std::byte* to, const std::byte* from, std::size_t num_bytes) {
  while (num_bytes > 0) {
    const std::size_t chunk_bytes = num_bytes < kChunkBytes ? num_bytes : kChunkBytes;
    std::memcpy(to, from, chunk_bytes);
    forget_where_it_came_from();
    XXH3_64bits_update(xxh, to, chunk_bytes);
    to += chunk_bytes;
    from += chunk_bytes;
    num_bytes -= chunk_bytes;
  }
}
#endif

// `to` may be null: then nothing is copied.
void update(void* state, std::byte* to, const std::byte* from, std::size_t num_bytes) {
  auto* const xxh = static_cast<XXH3_state_t*>(state);
  if (to == nullptr) {
    XXH3_64bits_update(xxh, from, num_bytes);
  } else {
    copy_and_sum(xxh, to, from, num_bytes);
  }
}

}  // namespace tpusync::host::TPUSYNC_KERNEL
