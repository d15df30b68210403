#include "tpusync/host/checked_copy.h"

#define TPUSYNC_KERNEL baseline
#include "tpusync/host/checked_copy_kernel.h"

namespace tpusync::host {

#if defined(__x86_64__)
namespace avx2 {
void update(void* state, std::byte* to, const std::byte* from, std::size_t num_bytes);
}
namespace avx512 {
void update(void* state, std::byte* to, const std::byte* from, std::size_t num_bytes);
}
#endif

namespace {

struct Kernel {
  const char* name;
  void (*update)(void*, std::byte*, const std::byte*, std::size_t);
};

// What this machine can run, the fastest first.
std::vector<Kernel> make_kernels() {
  std::vector<Kernel> kernels;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) kernels.push_back({"avx512", &avx512::update});
  if (__builtin_cpu_supports("avx2")) kernels.push_back({"avx2", &avx2::update});
#endif
  kernels.push_back({"baseline", &baseline::update});
  return kernels;
}

const std::vector<Kernel>& kernels() {
  static const auto* const made = new std::vector<Kernel>(make_kernels());  // used by threads at exit, too
  return *made;
}

}  // namespace

// What XXH3 keeps between updates does not depend on the instructions that update it.
struct CheckedCopy::State {
  XXH3_state_t xxh;
};

CheckedCopy::CheckedCopy(std::uint64_t seed, std::size_t kernel)
    : state_(std::make_unique<State>()), kernel_(kernel) {
  XXH3_INITSTATE(&state_->xxh);
  XXH3_64bits_reset_withSeed(&state_->xxh, seed);
}

CheckedCopy::~CheckedCopy() = default;

void CheckedCopy::copy(std::byte* to, std::span<const std::byte> from) {
  kernels()[kernel_].update(&state_->xxh, to, from.data(), from.size());
}

void CheckedCopy::look(std::span<const std::byte> bytes) {
  kernels()[kernel_].update(&state_->xxh, nullptr, bytes.data(), bytes.size());
}

std::uint64_t CheckedCopy::value() const {
  return XXH3_64bits_digest(&state_->xxh);
}

std::vector<const char*> checksum_instructions() {
  std::vector<const char*> names;
  for (const Kernel& kernel : kernels()) names.push_back(kernel.name);
  return names;
}

}  // namespace tpusync::host
