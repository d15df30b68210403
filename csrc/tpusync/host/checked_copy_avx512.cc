#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#pragma GCC target("avx2,avx512f")
// The intrinsics of GCC 12 begin with values that are undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define XXH_VECTOR 3  // XXH_AVX512
#define TPUSYNC_STREAM
#define TPUSYNC_KERNEL avx512
#include "tpusync/host/checked_copy_kernel.h"
#endif
