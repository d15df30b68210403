// What a configured path may be, and what is found there.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tpusync/base/prng.h"
#include "tpusync/flash/flash_store.h"
#include "tpusync/testing/sim_disk.h"
#include "tpusync/testing/store_harness.h"

namespace tpusync::flash {
namespace {

using base::Code;
using testing::count;
using testing::range;
using testing::SimDisk;
using testing::small_options;

base::Error open_error(const FlashOptions& options, os::FileSystem& files = os::posix_file_system()) {
  auto store = FlashStore::open(options, files);
  return store ? base::Error{Code::kOk, ""} : store.error();
}

bool mentions(const base::Error& error, std::string_view text) {
  return error.message.find(text) != std::string::npos;
}

TEST(StorePath, MissingParentsAreMadeForTheirOwnerOnly) {
  const testing::TempDirectory directory;
  const std::string path = directory.path() + "/a/b/c";
  ASSERT_EQ(open_error(small_options(path)).code, Code::kOk);
  struct stat status;
  for (const char* part : {"", "/v1"}) {
    ASSERT_EQ(::stat((path + part).c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0700u) << part;
  }
}

TEST(StorePath, FileIsRefusedByName) {
  const testing::TempDirectory directory;
  const std::string path = directory.path() + "/file";
  std::ofstream(path) << "x";
  const base::Error error = open_error(small_options(path));
  EXPECT_EQ(error.code, Code::kInvalid);
  EXPECT_TRUE(mentions(error, path + " is not a directory")) << error.message;
  EXPECT_EQ(open_error(small_options(path + "/below")).code, Code::kInvalid);
}

TEST(StorePath, MemoryFileSystemIsRefusedUnlessAllowed) {
  SimDisk disk({.in_memory = true});
  FlashOptions options = small_options("/store");
  options.allow_tmpfs = false;
  const base::Error error = open_error(options, disk);
  EXPECT_EQ(error.code, Code::kInvalid);
  EXPECT_TRUE(mentions(error, "allow_tmpfs")) << error.message;
  options.allow_tmpfs = true;
  EXPECT_EQ(open_error(options, disk).code, Code::kOk);
}

TEST(StorePath, ReadOnlyFileSystemIsRefused) {
  SimDisk disk({});
  ASSERT_TRUE(disk.make_directory("/store", 0700));
  disk.set_read_only(true);
  const base::Error error = open_error(small_options("/store"), disk);
  EXPECT_EQ(error.code, Code::kInvalid);
  EXPECT_TRUE(mentions(error, "read-only")) << error.message;
  EXPECT_EQ(open_error(small_options("/missing"), disk).code, Code::kInvalid);
}

TEST(StorePath, DirectoryOfAnotherUserIsRefusedWithBothNamed) {
  SimDisk disk({});
  ASSERT_TRUE(disk.make_directory("/store", 0700));
  disk.set_owner("/store", 77);
  const base::Error error = open_error(small_options("/store"), disk);
  EXPECT_EQ(error.code, Code::kInvalid);
  EXPECT_TRUE(mentions(error, "user 77")) << error.message;
  EXPECT_TRUE(mentions(error, "user 1000")) << error.message;
}

TEST(StorePath, NewerFormatDirectoryIsRefusedAndUntouched) {
  SimDisk disk({});
  ASSERT_TRUE(disk.make_directory("/store/v2", 0700));
  const base::Error error = open_error(small_options("/store"), disk);
  EXPECT_EQ(error.code, Code::kUnsupported);
  EXPECT_TRUE(mentions(error, "version 2")) << error.message;
  EXPECT_EQ(disk.list("/store").value(), std::vector<std::string>{"v2"});
}

TEST(StorePath, TableOfANewerVersionIsRefusedAndUntouched) {
  SimDisk disk({});
  const FlashOptions options = small_options("/store");
  const std::string directory = StorePath{"/store"}.name_space(options.name_space);
  ASSERT_EQ(open_error(options, disk).code, Code::kOk);
  const std::string table = directory + "/region-000.table";
  {
    auto file = disk.open(table, {}).value();
    ASSERT_TRUE(os::write_bytes(*file, encode_header({.version = 2, .name_space = options.name_space}), 0));
  }
  const auto before = disk.bytes(table);
  const base::Error error = open_error(options, disk);
  EXPECT_EQ(error.code, Code::kUnsupported);
  EXPECT_TRUE(mentions(error, "version 2")) << error.message;
  EXPECT_EQ(disk.bytes(table), before);
}

TEST(StorePath, OtherPageSizeUnderTheSameNamespaceIsRefusedWithBothSizes) {
  SimDisk disk({});
  ASSERT_EQ(open_error(small_options("/store", 4096), disk).code, Code::kOk);
  const base::Error error = open_error(small_options("/store", 8192), disk);
  EXPECT_EQ(error.code, Code::kInvalid);
  EXPECT_TRUE(mentions(error, "4096") && mentions(error, "8192")) << error.message;
}

TEST(StorePath, OtherNamespacesAreKeptAndTheirPagesAreMisses) {
  SimDisk disk({});
  FlashOptions options = small_options("/store");
  auto first = FlashStore::open(options, disk).value();
  testing::StoreCalls{*first, 4096}.put(range(0, 5));
  first.reset();
  options.name_space[31] ^= std::byte{1};
  options.name_space[0] ^= std::byte{1};
  auto second = FlashStore::open(options, disk).value();
  EXPECT_EQ(count(testing::StoreCalls{*second, 4096}.get(range(0, 5)), Code::kNotFound), 5u);
  second.reset();
  options = small_options("/store");
  first = FlashStore::open(options, disk).value();
  EXPECT_EQ(count(testing::StoreCalls{*first, 4096}.get(range(0, 5)), Code::kOk), 5u);
}

TEST(StorePath, LockedRegionGivesWayToTheNextAndComesBack) {
  const testing::TempDirectory directory;
  const FlashOptions options = small_options(directory.path());
  auto first = FlashStore::open(options).value();
  testing::StoreCalls{*first, 4096}.put(range(0, 5));
  auto second = FlashStore::open(options).value();
  EXPECT_EQ(std::get<std::string>(second->stats().back().value), "region-001");
  testing::StoreCalls{*second, 4096}.put(range(5, 9));
  second.reset();
  first.reset();
  first = FlashStore::open(options).value();
  EXPECT_EQ(testing::StoreCalls({*first, 4096}).stat("recovered_entries"), 5u);
}

TEST(StorePath, LogNamesTheProcessThatHoldsTheRegion) {
  SimDisk disk({});
  auto first = FlashStore::open(small_options("/store"), disk).value();
  const testing::LogCapture log;
  auto second = FlashStore::open(small_options("/store"), disk).value();
  EXPECT_EQ(log.count("locked by process " + std::to_string(::getpid())), 1u);
}

TEST(StorePath, IdentityIsReadableAndOrphansOfAKillAreRemoved) {
  SimDisk disk({});
  const FlashOptions options = small_options("/store");
  const std::string directory = StorePath{"/store"}.name_space(options.name_space);
  ASSERT_TRUE(disk.make_directory(directory, 0700));
  ASSERT_TRUE(disk.open(directory + "/namespace.json.tmp", {.create = true}));
  ASSERT_EQ(open_error(options, disk).code, Code::kOk);
  EXPECT_EQ(disk.list(directory).value(),
            (std::vector<std::string>{"namespace.json", "region-000.slots", "region-000.table"}));
  EXPECT_EQ(os::read_text(disk, directory + "/namespace.json", 1000).value(), options.namespace_json);
}

TEST(StorePath, OptionsOutOfRangeAreNamedWithWhatIsAllowed) {
  SimDisk disk({.total_bytes = 1 << 30});
  FlashOptions options = small_options("relative");
  EXPECT_TRUE(mentions(open_error(options, disk), "absolute"));
  options = small_options("/store", 0);
  EXPECT_TRUE(mentions(open_error(options, disk), "page_bytes: 0"));
  options = small_options("/store", 4096, std::uint64_t{1} << 40);
  const base::Error error = open_error(options, disk);
  EXPECT_EQ(error.code, Code::kInvalid);
  EXPECT_TRUE(mentions(error, "1099511627776") && mentions(error, "1073741824")) << error.message;
  options = small_options("/store", 4096, 100);
  EXPECT_TRUE(mentions(open_error(options, disk), "capacity_bytes: 100"));
  options = small_options("/store");
  options.num_threads = -1;
  EXPECT_TRUE(mentions(open_error(options, disk), "0 to 256"));
  options.num_threads = 1;
  options.floor_bytes = std::uint64_t{1} << 50;
  EXPECT_TRUE(mentions(open_error(options, disk), "floor_bytes"));
  options.floor_bytes = 0;
  options.io = IoKind::kUring;
  EXPECT_EQ(open_error(options, disk).code, Code::kUnsupported);
}

}  // namespace
}  // namespace tpusync::flash
