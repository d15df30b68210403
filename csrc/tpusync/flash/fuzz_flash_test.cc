#include "tpusync/testing/fuzz_flash.h"

#include <gtest/gtest.h>

#include <random>

namespace tpusync::flash {
namespace {

void mutate(std::vector<std::byte>& data, std::mt19937& random) {
  for (std::size_t n = 1 + random() % 6; n > 0 && !data.empty(); --n) {
    const std::size_t at = random() % data.size();
    switch (random() % 5) {
      case 0:
        data[at] ^= std::byte(1u << random() % 8);
        break;
      case 1:
        data[at] = std::byte(random());
        break;
      case 2:
        data.resize(1 + at);
        break;
      case 3:  // a record elsewhere
        if (at + 128 < data.size()) std::copy_n(data.begin() + at, 64, data.begin() + at + 64);
        break;
      default:
        if (at + 8 <= data.size()) std::fill_n(data.begin() + at, 8, std::byte(random() % 2 ? 0xff : 0));
    }
  }
}

TEST(FuzzFlash, NoMutationOfATableBreaksAPromise) {
  std::mt19937 random(1);
  for (int i = 0; i < 400; ++i) {
    auto data = fuzz_seed(std::byte(random()));
    mutate(data, random);
    fuzz_flash(data);
  }
}

TEST(FuzzFlash, TheSeedIsATableWhosePagesAreServed) {
  const auto seed = fuzz_seed(std::byte{0});
  fuzz_flash(seed);
  const auto block = block_of<kRecordBytes>(std::span(seed).subspan(1 + kHeaderBlockBytes));
  EXPECT_TRUE(decode_record(block, record_seed({}), index::SlotId{0}));
  EXPECT_EQ(with_checksums(seed).size(), seed.size());
}

}  // namespace
}  // namespace tpusync::flash
