#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#pragma GCC target("avx2")
#define XXH_VECTOR 2  // XXH_AVX2
#define TPUSYNC_STREAM
#define TPUSYNC_KERNEL avx2
#include "tpusync/host/checked_copy_kernel.h"
#endif
