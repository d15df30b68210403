#include "tpusync/layout/fuzz_layout.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

namespace tpusync::layout {
namespace {

using Bytes = std::vector<std::byte>;

Bytes bytes_of(std::string_view text) {
  Bytes out(text.size());
  std::memcpy(out.data(), text.data(), text.size());
  return out;
}

Bytes plan_between(std::string_view dtype, const Dims& dims, std::string_view from, std::string_view to) {
  const DType type = parse_dtype(dtype).value();
  const auto spec = [&](std::string_view text) {
    return ShardSpec{
        dims, type, {{Dims(dims.size()), dims, {}, TiledLayout::parse(text, type, dims).value(), {}}}};
  };
  return encode_plan(plan_reshard(spec(to), spec(from)).value());
}

std::vector<Bytes> seeds() {
  return {bytes_of("{3,2,1,0:T(8,128)(2,1)}"),
          bytes_of("{1,0:T(64,128)(8,1)E(4)S(5)}"),
          bytes_of("{0:T(1024)(128)(2,1)}"),
          bytes_of("{:T(128)}"),
          plan_between("BF16", {4, 8, 16}, "{2,1,0:T(4,8)(2,1)}", "{2,1,0}"),
          plan_between("F8E4M3FN", {7, 9}, "{1,0:T(4,4)(4,1)}", "{0,1:T(8,4)(4,1)}"),
          plan_between("S4", {5, 7}, "{1,0:T(8,4)(2,1)E(4)}", "{0,1:E(4)}")};
}

void mutate(Bytes& data, std::mt19937& random) {
  for (std::size_t n = 1 + random() % 4; n > 0; --n) {
    const std::size_t at = data.empty() ? 0 : random() % data.size();
    switch (random() % 6) {
      case 0:
        if (!data.empty()) data[at] ^= std::byte(1u << random() % 8);
        break;
      case 1:
        if (!data.empty()) data[at] = std::byte(random());
        break;
      case 2:
        data.insert(data.begin() + static_cast<std::ptrdiff_t>(at),
                    std::byte("0123456789,:(){}TESL*"[random() % 21]));
        break;
      case 3:
        if (!data.empty()) data.erase(data.begin() + static_cast<std::ptrdiff_t>(at));
        break;
      case 4:
        data.resize(at);
        break;
      default: {
        // A number of a plan: small, huge or one of another place.
        if (data.size() < 16) break;
        const std::uint64_t values[] = {
            0, 1, 2, random() % 4096, UINT64_MAX, UINT64_MAX / random(), std::uint64_t{1} << random() % 64};
        std::memcpy(data.data() + random() % (data.size() - 8), &values[random() % std::size(values)], 8);
      }
    }
  }
}

// TPUSYNC_FUZZ_SEED and TPUSYNC_FUZZ_SECONDS make a campaign of the smoke; with clang the same function is a
// libFuzzer target.
long setting(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtol(text, nullptr, 10);
}

TEST(FuzzLayout, NoMutationOfASeedBreaksAPromise) {
  std::mt19937 random(static_cast<unsigned>(setting("TPUSYNC_FUZZ_SEED", 1)));
  const auto corpus = seeds();
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::seconds(setting("TPUSYNC_FUZZ_SECONDS", 0));
  long rounds = 0;
  do {
    for (int i = 0; i < 2000; ++i, ++rounds) {
      Bytes data = corpus[random() % corpus.size()];
      mutate(data, random);
      fuzz_layout(data);
    }
  } while (std::chrono::steady_clock::now() < end);
  RecordProperty("rounds", std::to_string(rounds));
}

TEST(FuzzLayout, SeedsAreAccepted) {
  for (const Bytes& seed : seeds()) {
    const std::string_view text(reinterpret_cast<const char*>(seed.data()), seed.size());
    EXPECT_TRUE(parse_layout_spec(text).has_value() || decode_plan(seed).has_value());
    fuzz_layout(seed);
  }
}

}  // namespace
}  // namespace tpusync::layout
