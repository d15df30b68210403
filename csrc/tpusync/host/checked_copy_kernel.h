// The inner loop of checked_copy.cc, compiled once per instruction set: each including file names its own
// namespace in TPUSYNC_KERNEL and selects its instructions before the include.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstddef>
#include <cstring>

namespace tpusync::host::TPUSYNC_KERNEL {

constexpr std::size_t kChunkBytes = 4096;  // in the first-level cache, twice over

// `to` may be null: then nothing is copied.
void update(void* state, std::byte* to, const std::byte* from, std::size_t num_bytes) {
  auto* const xxh = static_cast<XXH3_state_t*>(state);
  if (to == nullptr) {
    XXH3_64bits_update(xxh, from, num_bytes);
    return;
  }
  while (num_bytes > 0) {
    const std::size_t chunk_bytes = num_bytes < kChunkBytes ? num_bytes : kChunkBytes;
    std::memcpy(to, from, chunk_bytes);
    XXH3_64bits_update(xxh, to, chunk_bytes);
    to += chunk_bytes;
    from += chunk_bytes;
    num_bytes -= chunk_bytes;
  }
}

}  // namespace tpusync::host::TPUSYNC_KERNEL
