// The libFuzzer target of the layout room: text of layouts and bytes of plans.
#include "tpusync/layout/fuzz_layout.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tpusync::layout::fuzz_layout({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}
