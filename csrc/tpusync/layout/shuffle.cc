#include "tpusync/layout/shuffle.h"

#include <vector>

namespace tpusync::layout {

std::span<const ShuffleKernels* const> shuffle_kernels() {
  // Leaked on purpose: threads may copy while the process ends.
  static const auto& usable = *new const std::vector<const ShuffleKernels*>([] {
    std::vector<const ShuffleKernels*> out{&portable_kernels()};
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2")) return out;
    out.push_back(&avx2_kernels());
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vbmi");
    if (avx512) out.push_back(&avx512_kernels());
#endif
    return out;
  }());
  return usable;
}

const ShuffleKernels& best_shuffle_kernels() {
  return *shuffle_kernels().back();
}

}  // namespace tpusync::layout
