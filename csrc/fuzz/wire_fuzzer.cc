// The libFuzzer target of the wire room: every decoder of frames and handshakes.
#include "tpusync/wire/fuzz_wire.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tpusync::wire::fuzz_wire({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}
