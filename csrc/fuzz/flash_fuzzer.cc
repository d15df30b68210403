// The libFuzzer target of the flash room: slot tables and ledgers.
#include "tpusync/testing/fuzz_flash.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tpusync::flash::fuzz_flash({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}
