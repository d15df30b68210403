#include "tpusync/host/registry.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "tpusync/host/peer_region.h"
#include "tpusync/host/testing.h"

namespace tpusync::host {
namespace {

using base::Code;
using namespace testing;

TEST(Registry, KnowsRegionsByTheirNamesAndNothingElse) {
  MemoryDirectory directory;
  const auto region = open_region(options_in(directory.path(), small_geometry(4))).value();
  const auto other = open_region(options_in(directory.path(), small_geometry(4), 2)).value();
  for (const char* name : {"x.region", "-0.region", "README", "zz-1.region"}) {
    std::ofstream(directory.path() + "/" + name) << "x";
  }
  const Registry registry = Registry::open(directory.path()).value();
  EXPECT_EQ(registry.entries().size(), 2u);
  const auto entries = registry.entries_of(digest_of(2));
  ASSERT_EQ(entries.size(), 1u);
  EXPECT_EQ(entries[0].path, other->file().file().path());
  EXPECT_EQ(entries[0].number, 0);
}

TEST(Registry, ADirectoryThatOthersMayEnterIsRefused) {
  MemoryDirectory directory;
  ::chmod(directory.path().c_str(), 0755);
  EXPECT_EQ(Registry::open(directory.path()).error().code, Code::kInvalid);
  EXPECT_EQ(Registry::open("relative").error().code, Code::kInvalid);
  const std::string file = directory.path() + "/file";
  std::ofstream(file) << "x";
  EXPECT_FALSE(Registry::open(file));
}

TEST(Registry, ADirectoryOfAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make one";
  MemoryDirectory directory;
  ASSERT_EQ(::chown(directory.path().c_str(), 12345, 12345), 0);
  const auto refused = Registry::open(directory.path());
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("user 12345"), std::string::npos);
  EXPECT_NE(refused.error().message.find("user 0"), std::string::npos);
}

TEST(OpenRegion, ALivingRegionIsLeftAloneAndAnotherIsMade) {
  MemoryDirectory directory;
  const auto first = open_region(options_in(directory.path(), small_geometry(4))).value();
  const auto second = open_region(options_in(directory.path(), small_geometry(4))).value();
  EXPECT_NE(first->file().file().path(), second->file().file().path());
}

TEST(OpenRegion, ARegionOfAnotherGeometryStaysReadableBesideTheNewOne) {
  MemoryDirectory directory;
  {
    put_pages(*open_region(options_in(directory.path(), small_geometry(4))).value(), 0, 4);
  }
  const auto region = open_region(options_in(directory.path(), small_geometry(4, 8192))).value();
  EXPECT_EQ(region->match(keys_of(0, 4)), 0u);
  EXPECT_EQ(Registry::open(directory.path())->entries().size(), 2u);
}

TEST(OpenRegion, TheOneThatNeedsNoResizingIsAdoptedFirst) {
  MemoryDirectory directory;
  {
    const auto small = open_region(options_in(directory.path(), small_geometry(8))).value();
    const auto fitting = open_region(options_in(directory.path(), small_geometry(16))).value();
    put_pages(*fitting, 0, 16);
  }
  const auto region = open_region(options_in(directory.path(), small_geometry(16))).value();
  EXPECT_EQ(region->match(keys_of(0, 16)), 16u);
}

TEST(OpenRegion, ADamagedHeaderIsReplacedAndANewerVersionIsLeftAlone) {
  for (const bool newer : {false, true}) {
    MemoryDirectory directory;
    std::string path;
    {
      const auto region = open_region(options_in(directory.path(), small_geometry(4))).value();
      put_pages(*region, 0, 4);
      path = region->file().file().path();
    }
    {
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(newer ? 8 : 30);
      file.put(newer ? 2 : 0x55);
    }
    EXPECT_FALSE(PeerRegion::open(path, digest_of(1)));
    const auto region = open_region(options_in(directory.path(), small_geometry(4))).value();
    EXPECT_EQ(region->match(keys_of(0, 1)), 0u);
    EXPECT_EQ(Registry::open(directory.path())->entries().size(), newer ? 2u : 1u);
  }
}

TEST(OpenRegion, ATruncatedFileIsNeverMappedBeyondItsEnd) {
  MemoryDirectory directory;
  std::string path;
  {
    const auto region = open_region(options_in(directory.path(), small_geometry(64))).value();
    put_pages(*region, 0, 64);
    path = region->file().file().path();
  }
  for (const std::uint64_t size :
       {std::uint64_t{5} << 20, std::uint64_t{2} << 20, std::uint64_t{100}, std::uint64_t{0}}) {
    std::filesystem::resize_file(path, size);
    EXPECT_EQ(PeerRegion::open(path, digest_of(1)).error().code, Code::kCorrupt) << size;
    EXPECT_FALSE(RegionFile::adopt(path, {.geometry = small_geometry(64), .name_space = digest_of(1)}))
        << size;
  }
  const auto region = open_region(options_in(directory.path(), small_geometry(64))).value();
  EXPECT_EQ(put_pages(*region, 0, 64).size(), 64u);
}

TEST(OpenRegion, NoRoomIsSaidWithItsArithmetic) {
  MemoryDirectory directory;
  OpenOptions options = options_in(directory.path(), small_geometry(1024));
  options.cap_bytes = base::kMiB;
  const auto refused = open_region(options);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kExhausted);
  for (const char* part : {"1024 slots of 8192 bytes", "node cap 1.00 MiB", "needed", "missing"}) {
    EXPECT_NE(refused.error().message.find(part), std::string::npos) << refused.error().message;
  }
  EXPECT_TRUE(Registry::open(directory.path())->entries().empty());
}

TEST(OpenRegion, DeadRegionsOfOthersMakeRoomAndLivingOnesDoNot) {
  MemoryDirectory directory;
  const auto alive = open_region(options_in(directory.path(), small_geometry(1024), 2)).value();
  {
    put_pages(*open_region(options_in(directory.path(), small_geometry(1024), 3)).value(), 0, 8);
  }
  OpenOptions options = options_in(directory.path(), small_geometry(1024));
  options.cap_bytes = 24 * base::kMiB;  // each takes 10 MiB: 8 of pages and 2 of tables
  const auto region = open_region(options);
  ASSERT_TRUE(region) << region.error().message;
  EXPECT_EQ(Registry::open(directory.path())->entries_of(digest_of(3)).size(), 0u);
  EXPECT_EQ(Registry::open(directory.path())->entries_of(digest_of(2)).size(), 1u);
  options.name_space = digest_of(4);
  EXPECT_EQ(open_region(options).error().code, Code::kExhausted);
}

TEST(OpenRegion, OptionsOutOfTheirRangeAreNamed) {
  OpenOptions options = options_in("/x", small_geometry(4));
  options.num_threads = 0;
  EXPECT_NE(open_region(options).error().message.find("num_threads: 0"), std::string::npos);
  options = options_in("relative", small_geometry(4));
  EXPECT_NE(open_region(options).error().message.find("relative"), std::string::npos);
}

TEST(OpenRegion, OddPagesWorkAndSurviveWithTheSameCapacityOnly) {
  MemoryDirectory directory;
  const Geometry odd{.piece_bytes = {1000, 3, 500}, .num_slots = 7};
  {
    const auto region = open_region(options_in(directory.path(), odd)).value();
    put_pages(*region, 0, 7);
  }
  Geometry larger = odd;
  larger.num_slots = 9;
  {
    EXPECT_EQ(open_region(options_in(directory.path(), larger)).value()->match(keys_of(0, 7)), 0u);
  }
  const auto region = open_region(options_in(directory.path(), odd)).value();
  PageBuffer buffer(odd);
  ASSERT_TRUE(region->get(key_of(6), buffer.to()));
  EXPECT_TRUE(buffer.is_page(6));
}

}  // namespace
}  // namespace tpusync::host
