#include "tpusync/host/checked_copy.h"

#define TPUSYNC_KERNEL baseline
#include "tpusync/host/checked_copy_kernel.h"

namespace tpusync::host {

#if defined(__x86_64__)
namespace avx2 {
void update(void* state, std::byte* to, const std::byte* from, std::size_t num_bytes);
}
#endif

namespace {

struct Kernel {
  const char* name;
  void (*update)(void*, std::byte*, const std::byte*, std::size_t);
};

Kernel choose_kernel() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return {"avx2", &avx2::update};
#endif
  return {"baseline", &baseline::update};
}

const Kernel& kernel() {
  static const Kernel chosen = choose_kernel();
  return chosen;
}

}  // namespace

// What XXH3 keeps between updates does not depend on the instructions that update it.
struct CheckedCopy::State {
  XXH3_state_t xxh;
};

CheckedCopy::CheckedCopy(std::uint64_t seed) : state_(std::make_unique<State>()) {
  XXH3_INITSTATE(&state_->xxh);
  XXH3_64bits_reset_withSeed(&state_->xxh, seed);
}

CheckedCopy::~CheckedCopy() = default;

void CheckedCopy::copy(std::byte* to, std::span<const std::byte> from) {
  kernel().update(&state_->xxh, to, from.data(), from.size());
}

void CheckedCopy::look(std::span<const std::byte> bytes) {
  kernel().update(&state_->xxh, nullptr, bytes.data(), bytes.size());
}

std::uint64_t CheckedCopy::value() const {
  return XXH3_64bits_digest(&state_->xxh);
}

const char* checksum_instructions() {
  return kernel().name;
}

}  // namespace tpusync::host
