// The seeded smoke of fuzz/wire_decoders.cc: random bytes, and valid messages with a few bytes changed.
#include "tpusync/wire/fuzz_wire.h"

#include <gtest/gtest.h>

#include "tpusync/base/prng.h"

namespace tpusync::wire {
namespace {

std::vector<Bytes> corpus() {
  std::vector<Bytes> out(7);
  std::size_t next = 0;
  const auto add = [&](auto encode) {
    Writer writer(out[next++]);
    encode(writer);
  };
  add([](Writer& w) { encode_head({FrameType::kData, kFlagChecksum, 32, 9, 1, 2, 3, 4}, w); });
  add([](Writer& w) { encode_table(DataTable{7, {{1, 2, 3}, {4, 5, 6}}}, w); });
  add([](Writer& w) { encode_table(OfferTable{7, {{{1, 2, 3}, 4, 5}}}, w); });
  add([](Writer& w) { encode_table(ShareTable{1, 4096, 8192}, w); });
  add([](Writer& w) { encode_table(RefuseTable{1, base::Code::kInvalid, "reason"}, w); });
  add([](Writer& w) { encode_hello({}, w); });
  add([](Writer& w) { encode_challenge({}, w); });
  return out;
}

TEST(Fuzz, DecodersSurviveAndAgreeWithTheEncoders) {
  base::Prng prng(20261201);
  const std::vector<Bytes> seeds = corpus();
  for (const Bytes& seed : seeds) fuzz_wire(seed);
  for (int i = 0; i < 200000; ++i) {
    Bytes input = seeds[prng.below(seeds.size())];
    if (prng.one_in(4)) {
      input.resize(prng.below(120));
      prng.fill(input);
    }
    for (std::uint64_t n = prng.below(4); n > 0 && !input.empty(); --n) {
      input[prng.below(input.size())] =
          static_cast<std::byte>(prng.one_in(2) ? prng.next() : 0xff * prng.below(2));
    }
    if (prng.one_in(8)) input.resize(prng.below(input.size() + 20));
    fuzz_wire(input);
  }
}

}  // namespace
}  // namespace tpusync::wire
