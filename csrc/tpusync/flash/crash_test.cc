// A real writer process, killed with SIGKILL at seeded moments; then the directory is opened and compared
// with what the writer had said. And a directory whose bytes were damaged anywhere.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "tpusync/base/prng.h"
#include "tpusync/flash/flash_store.h"
#include "tpusync/testing/store_harness.h"

namespace tpusync::flash {
namespace {

using base::Code;
using testing::count;
using testing::range;
using testing::StoreCalls;

constexpr std::uint64_t kPageBytes = 8192;

// Runs in the child until it is killed: random puts and removes; says each acknowledged page on `pipe`.
[[noreturn]] void write_until_killed(const FlashOptions& options, int pipe, std::uint64_t seed) {
  auto store = FlashStore::open(options);
  if (!store) ::_exit(3);
  const StoreCalls calls{**store, kPageBytes};
  base::Prng prng(seed);
  for (std::uint64_t next = seed * 1'000'000;; next += 20) {
    const auto numbers = range(next, next + 1 + prng.below(20));
    const auto outcomes = calls.put(numbers);
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      if (outcomes[i] != Code::kOk) continue;
      if (::write(pipe, &numbers[i], sizeof numbers[i]) != sizeof numbers[i]) ::_exit(4);
    }
    if (prng.one_in(4)) calls.get(range(next - std::min<std::uint64_t>(next, 40), next));
  }
}

// The pages that a writer acknowledged before it was killed after about `num_pages` of them.
std::vector<std::uint64_t> run_and_kill(const FlashOptions& options, std::uint64_t seed,
                                        std::size_t num_pages) {
  int pipe[2];
  if (::pipe(pipe) != 0) return {};
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(pipe[0]);
    write_until_killed(options, pipe[1], seed);
  }
  ::close(pipe[1]);
  std::vector<std::uint64_t> acknowledged;
  std::uint64_t number = 0;
  while (::read(pipe[0], &number, sizeof number) == sizeof number) {
    acknowledged.push_back(number);
    if (acknowledged.size() == num_pages) ::kill(child, SIGKILL);
  }
  ::close(pipe[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status)) << "the writer ended by itself: " << WEXITSTATUS(status);
  return acknowledged;
}

std::set<std::string> files_below(const std::string& path) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    if (entry.is_regular_file()) names.insert(entry.path().filename());
  }
  return names;
}

TEST(Crash, KilledWriterLosesNothingAcknowledged) {
  base::Prng prng(1);
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    const testing::TempDirectory directory;
    FlashOptions options = testing::small_options(directory.path(), kPageBytes, 64 * base::kMiB);
    options.fsync = seed % 4 == 0 ? FsyncPolicy::kAlways : FsyncPolicy::kNone;
    const auto acknowledged = run_and_kill(options, seed, 1 + prng.below(400));
    auto store = FlashStore::open(options);
    ASSERT_TRUE(store) << store.error().message;
    const StoreCalls calls{**store, kPageBytes};
    EXPECT_EQ(calls.stat("evicted"), 0u);
    EXPECT_EQ(count(calls.get(acknowledged), Code::kOk), acknowledged.size()) << "seed " << seed;
    EXPECT_EQ(calls.stat("corrupt"), 0u) << "seed " << seed;
    EXPECT_EQ(files_below(directory.path()), (std::set<std::string>{"ledger", "lock", "namespace.json",
                                                                    "region-000.slots", "region-000.table"}));
  }
}

// The same directory again and again, full: every entry that is found reads back.
TEST(Crash, KilledWhileEvictingEveryEntryReadsBack) {
  const testing::TempDirectory directory;
  const FlashOptions options = testing::small_options(directory.path(), kPageBytes, 100 * kPageBytes);
  base::Prng prng(2);
  std::uint64_t num_acknowledged = 0;
  for (std::uint64_t seed = 100; seed < 112; ++seed) {
    const auto acknowledged = run_and_kill(options, seed, 1 + prng.below(600));
    auto store = FlashStore::open(options);
    ASSERT_TRUE(store) << store.error().message;
    const StoreCalls calls{**store, kPageBytes};
    std::vector<std::uint64_t> found;
    for (std::uint64_t number : acknowledged) {
      if (calls.has(number)) found.push_back(number);
    }
    EXPECT_EQ(count(calls.get(found), Code::kOk), found.size()) << "seed " << seed;
    // A kill costs no more than the batches that were on their way, of 20 pages at most, and their victims.
    num_acknowledged += acknowledged.size();
    EXPECT_GE(calls.stat("entries") + 40, std::min(calls.stat("slots"), num_acknowledged)) << "seed " << seed;
    EXPECT_EQ(calls.stat("corrupt"), 0u) << "seed " << seed;
    EXPECT_LE(calls.stat("bytes_on_disk"), *options.capacity_bytes);
    EXPECT_TRUE((*store)->consistent());
  }
}

class Damage : public ::testing::Test {
 protected:
  void SetUp() override {
    auto store = FlashStore::open(options_).value();
    ASSERT_EQ(count(StoreCalls{*store, kPageBytes}.put(range(0, kNumPages)), Code::kOk), kNumPages);
  }

  std::string file(const char* suffix) const {
    return StorePath{directory_.path()}.name_space(options_.name_space) + "/region-000" + suffix;
  }

  // Applies `change` to a stretch of a file.
  void damage(const std::string& path, std::uint64_t offset, std::size_t length, std::uint64_t seed) {
    std::fstream stream(path, std::ios::in | std::ios::out | std::ios::binary);
    std::vector<char> bytes(length);
    stream.seekg(static_cast<std::streamoff>(offset));
    stream.read(bytes.data(), static_cast<std::streamsize>(length));
    const auto num_read = stream.gcount();
    stream.clear();
    base::Prng prng(seed);
    for (char& b : bytes) b = static_cast<char>(b ^ static_cast<char>(1 + prng.below(255)));
    stream.seekp(static_cast<std::streamoff>(offset));
    stream.write(bytes.data(), num_read);
  }

  // Opens, reads every page, and answers how many are missing.
  std::size_t num_lost() {
    auto store = FlashStore::open(options_);
    EXPECT_TRUE(store) << store.error().message;
    if (!store) return kNumPages;
    const auto outcomes = StoreCalls{**store, kPageBytes}.get(range(0, kNumPages));
    EXPECT_EQ(count(outcomes, Code::kUnsupported), 0u) << "wrong bytes";
    return kNumPages - count(outcomes, Code::kOk);
  }

  static constexpr std::uint64_t kNumPages = 24;
  testing::TempDirectory directory_;
  FlashOptions options_ = testing::small_options(directory_.path(), kPageBytes, 64 * kPageBytes);
};

TEST_F(Damage, OneByteAnywhereLosesAtMostOnePage) {
  base::Prng prng(7);
  std::size_t num_lost_before = 0;
  const testing::LogCapture log;
  for (int i = 0; i < 60; ++i) {
    const std::string path = file(prng.one_in(2) ? ".slots" : ".table");
    damage(path, prng.below(std::filesystem::file_size(path)), 1, prng.next());
    const std::size_t now = num_lost();
    EXPECT_LE(now, num_lost_before + 1);
    num_lost_before = now;
  }
  EXPECT_GT(num_lost_before, 0u) << "the damage never hit anything";
}

TEST_F(Damage, WholeTableLostIsAnEmptyStoreThatWorks) {
  damage(file(".table"), 0, std::filesystem::file_size(file(".table")), 3);
  const testing::LogCapture log;
  EXPECT_EQ(num_lost(), kNumPages);
  auto store = FlashStore::open(options_).value();
  EXPECT_EQ(count(StoreCalls{*store, kPageBytes}.put(range(0, 10)), Code::kOk), 10u);
}

TEST_F(Damage, HeaderLostLosesNoPage) {
  damage(file(".table"), 0, kHeaderBlockBytes, 4);
  const testing::LogCapture log;
  EXPECT_EQ(num_lost(), 0u);
  EXPECT_EQ(num_lost(), 0u) << "and is whole again";
}

TEST_F(Damage, SectorOfTheTableLosesOnlyItsEntries) {
  damage(file(".table"), record_offset(8), 512, 5);
  const testing::LogCapture log;
  EXPECT_EQ(num_lost(), 8u);
}

TEST_F(Damage, TruncatedFilesLoseTheirEndOnly) {
  std::filesystem::resize_file(file(".slots"), 10 * kPageBytes + 100);
  EXPECT_EQ(num_lost(), 14u);
  std::filesystem::resize_file(file(".table"), record_offset(5) + 10);
  const testing::LogCapture log;
  EXPECT_EQ(num_lost(), 19u);
}

TEST_F(Damage, SwappedSlotsAreMissesNotEachOther) {
  std::fstream stream(file(".slots"), std::ios::in | std::ios::out | std::ios::binary);
  std::vector<char> first(kPageBytes), second(kPageBytes);
  stream.read(first.data(), kPageBytes);
  stream.read(second.data(), kPageBytes);
  stream.seekp(0);
  stream.write(second.data(), kPageBytes);
  stream.write(first.data(), kPageBytes);
  stream.close();
  const testing::LogCapture log;
  EXPECT_EQ(num_lost(), 2u);
}

TEST_F(Damage, SwappedRecordsAreMissesNotEachOther) {
  std::fstream stream(file(".table"), std::ios::in | std::ios::out | std::ios::binary);
  std::vector<char> both(2 * kRecordBytes);
  stream.seekg(record_offset(3));
  stream.read(both.data(), static_cast<std::streamsize>(both.size()));
  std::rotate(both.begin(), both.begin() + kRecordBytes, both.end());
  stream.seekp(record_offset(3));
  stream.write(both.data(), static_cast<std::streamsize>(both.size()));
  stream.close();
  const testing::LogCapture log;
  EXPECT_EQ(num_lost(), 2u);
}

}  // namespace
}  // namespace tpusync::flash
