// libFuzzer target over the decoders of wire/: built with -DTPUSYNC_FUZZ=ON by clang.
#include <cstdint>

#include "tpusync/wire/fuzz_entry.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tpusync::wire::fuzz_decoders(std::as_bytes(std::span(data, size)));
  return 0;
}
