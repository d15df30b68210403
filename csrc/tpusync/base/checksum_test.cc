#include "tpusync/base/checksum.h"

#include <gtest/gtest.h>

#include <vector>

#include "tpusync/base/prng.h"

namespace tpusync::base {
namespace {

TEST(Checksum, PiecesEqualTheWholeAtEverySplit) {
  Prng prng(1);
  std::vector<std::byte> bytes(5000);
  prng.fill(bytes);
  const std::uint64_t whole = checksum64(bytes, 7);
  for (std::size_t split : {0ul, 1ul, 239ul, 240ul, 241ul, 1024ul, 4999ul, 5000ul}) {
    Checksum pieces(7);
    pieces.update(std::span(bytes).first(split));
    pieces.update(std::span(bytes).subspan(split));
    EXPECT_EQ(pieces.value(), whole) << split;
  }
}

TEST(Checksum, DependsOnSeedAndOnEveryByte) {
  std::vector<std::byte> bytes(300);
  const std::uint64_t before = checksum64(bytes, 1);
  EXPECT_NE(before, checksum64(bytes, 2));
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = std::byte{1};
    EXPECT_NE(checksum64(bytes, 1), before) << i;
    bytes[i] = std::byte{0};
  }
}

// Files on disk depend on this value: it may never change.
TEST(Checksum, IsXxh3) {
  EXPECT_EQ(checksum64({}, 0), 0x2d06800538d394c2ull);
}

}  // namespace
}  // namespace tpusync::base
