#include "tpusync/index/ghost_table.h"

#include <gtest/gtest.h>

#include "tpusync/base/prng.h"

namespace tpusync::index {
namespace {

TEST(GhostTable, RemembersUntilTaken) {
  GhostTable ghosts;
  ghosts.reserve(64);
  EXPECT_EQ(ghosts.find(17).num_uses, 0u);
  ghosts.put(17, 5, 2, 5);
  EXPECT_EQ(ghosts.find(17).last_use, 5u);
  EXPECT_EQ(ghosts.find(17).num_uses, 2u);
  EXPECT_EQ(ghosts.take(17).last_use, 5u);
  EXPECT_EQ(ghosts.take(17).num_uses, 0u);
}

TEST(GhostTable, APageHasOneGhost) {
  GhostTable ghosts;
  ghosts.reserve(64);
  ghosts.put(17, 5, 2, 5);
  ghosts.put(17, 9, 3, 9);
  EXPECT_EQ(ghosts.take(17).last_use, 9u);
  EXPECT_EQ(ghosts.take(17).num_uses, 0u);
}

TEST(GhostTable, ForgetsTheOneOfASetThatWasUsedLongestAgoAlsoWhenTimeRunsOver) {
  GhostTable ghosts;
  ghosts.reserve(4);  // one set
  const std::uint32_t begin = 0xfffffffe;
  for (std::uint32_t i = 0; i < 4; ++i) ghosts.put(i + 1, begin + i, 1, begin + i);
  ghosts.put(9, begin - 100, 1, begin + 4);
  EXPECT_EQ(ghosts.find(1).num_uses, 0u);
  for (std::uint64_t key : {2, 3, 4, 9}) EXPECT_EQ(ghosts.find(key).num_uses, 1u) << key;
}

TEST(GhostTable, IsBoundedAndKeepsMostOfWhatFits) {
  GhostTable ghosts;
  ghosts.reserve(1000);
  EXPECT_EQ(ghosts.places().size(), 1024u);
  base::Prng prng(1);
  std::uint32_t num_known = 0;
  for (std::uint32_t now = 0; now < 512; ++now) ghosts.put(prng.next(), now, 1, now);
  prng = base::Prng(1);
  for (std::uint32_t now = 0; now < 512; ++now) num_known += ghosts.find(prng.next()).num_uses;
  EXPECT_GT(num_known, 480u);
  EXPECT_EQ(ghosts.places().size(), 1024u);
}

}  // namespace
}  // namespace tpusync::index
