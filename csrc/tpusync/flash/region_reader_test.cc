// Readers beside a writer that goes on, stops or is killed, on a real and on a simulated disk.
#include "tpusync/flash/region_reader.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <map>
#include <thread>

#include "tpusync/base/prng.h"
#include "tpusync/flash/flash_store.h"
#include "tpusync/flash/region.h"
#include "tpusync/testing/sim_disk.h"
#include "tpusync/testing/store_harness.h"

namespace tpusync::flash {
namespace {

using base::Code;
using index::SlotId;
using testing::count;
using testing::key_of;
using testing::range;
using testing::SimDisk;
using testing::StoreCalls;
using Kind = RegionReader::Kind;

constexpr std::uint64_t kPageBytes = 8192;

std::string base_path(const FlashOptions& options) {
  return StorePath{options.path}.name_space(options.name_space) + "/region-000";
}

std::map<SlotId, SlotRecord> entries_of(const RegionReader& reader) {
  std::map<SlotId, SlotRecord> entries;
  const auto scanned =
      reader.scan(SlotId{0}, reader.num_records().value(), [&](SlotId slot, const RegionReader::Seen& seen) {
        if (seen.kind == Kind::kHolds) entries[slot] = seen.record;
      });
  EXPECT_TRUE(scanned);
  return entries;
}

// Reads page `number`; kUnsupported for wrong bytes, which no reader may ever answer.
Code read(const RegionReader& reader, SlotId slot, std::uint64_t number) {
  const testing::PageMemory memory(1, kPageBytes);
  BufferPool pool(reader.header().slot_bytes);
  testing::fill_page(~number, memory.page(0));
  PageBuffer buffer(memory.addresses(), memory.lengths(), reader.slots(), pool);
  const auto status = reader.read(slot, key_of(number), buffer);
  if (!status) return status.error().code;
  return testing::is_page(number, memory.page(0)) ? Code::kOk : Code::kUnsupported;
}

// The slots of pages [0, num) by number.
std::map<std::uint64_t, SlotId> slots_of(const RegionReader& reader, std::uint64_t num) {
  std::map<index::PageKey, SlotId> by_key;
  for (const auto& [slot, record] : entries_of(reader)) by_key[record.key] = slot;
  std::map<std::uint64_t, SlotId> slots;
  for (std::uint64_t number = 0; number < num; ++number) {
    const auto found = by_key.find(key_of(number));
    if (found != by_key.end()) slots[number] = found->second;
  }
  return slots;
}

class Reader : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (GetParam()) sim_ = std::make_unique<SimDisk>(SimDisk::Options{.direct_align_bytes = 512});
    options_ = testing::small_options(sim_ ? "/store" : directory_.path(), kPageBytes, 64 * kPageBytes);
    store_ = FlashStore::open(options_, files()).value();
  }

  os::FileSystem& files() { return sim_ ? static_cast<os::FileSystem&>(*sim_) : os::posix_file_system(); }
  StoreCalls calls() { return {*store_, kPageBytes}; }
  std::unique_ptr<RegionReader> open_reader() {
    auto reader = RegionReader::open(files(), {.base_path = base_path(options_)});
    EXPECT_TRUE(reader) << reader.error().message;
    return std::move(*reader);
  }

  testing::TempDirectory directory_;
  std::unique_ptr<SimDisk> sim_;
  FlashOptions options_;
  std::unique_ptr<FlashStore> store_;
};

TEST_P(Reader, SeesWhatALiveWriterAddsAndRemoves) {
  calls().put(range(0, 5));
  const auto reader = open_reader();
  EXPECT_EQ(entries_of(*reader).size(), 5u);
  calls().put(range(5, 20));
  store_->remove(testing::keys_of(range(0, 3)));
  EXPECT_EQ(entries_of(*reader).size(), 17u);
  const auto slots = slots_of(*reader, 20);
  ASSERT_EQ(slots.size(), 17u);
  for (const auto& [number, slot] : slots) EXPECT_EQ(read(*reader, slot, number), Code::kOk);
  EXPECT_EQ(reader->header().page_bytes, kPageBytes);
  EXPECT_TRUE(reader->is_current());
}

TEST_P(Reader, SlotUnderAnotherKeyOrFreeIsAMiss) {
  calls().put(range(0, 2));
  const auto reader = open_reader();
  const auto slots = slots_of(*reader, 2);
  EXPECT_EQ(read(*reader, slots.at(0), 1), Code::kNotFound);
  store_->remove(testing::keys_of(range(0, 1)));
  EXPECT_EQ(read(*reader, slots.at(0), 0), Code::kNotFound);
  EXPECT_EQ(read(*reader, SlotId{1'000'000}, 0), Code::kNotFound);
}

TEST_P(Reader, MisalignedMemoryGetsThePageToo) {
  calls().put(range(0, 1));
  const auto reader = open_reader();
  const testing::PageMemory memory(1, kPageBytes, 3, 8);
  BufferPool pool(reader->header().slot_bytes);
  PageBuffer buffer(memory.addresses(), memory.lengths(), reader->slots(), pool);
  ASSERT_TRUE(reader->read(slots_of(*reader, 1).at(0), key_of(0), buffer));
  EXPECT_TRUE(testing::is_page(0, memory.page(0)));
}

// Overwrites the same few slots all the time while readers look for whatever the table says.
TEST_P(Reader, NeverReadsAWrongByteWhileSlotsAreReused) {
  constexpr std::uint64_t kNumPages = 1200;
  std::atomic<bool> done{false};
  std::atomic<std::uint64_t> num_read{0};
  std::vector<std::jthread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      const auto reader = open_reader();
      while (!done) {
        for (const auto& [number, slot] : slots_of(*reader, kNumPages)) {
          const Code code = read(*reader, slot, number);
          EXPECT_TRUE(code == Code::kOk || code == Code::kNotFound) << base::code_name(code);
          num_read += code == Code::kOk;
        }
      }
    });
  }
  for (std::uint64_t next = 0; next < kNumPages; next += 10) calls().put(range(next, next + 10));
  while (num_read == 0) std::this_thread::yield();
  done = true;
  readers.clear();
  EXPECT_GT(calls().stat("evicted"), 1000u);
}

TEST_P(Reader, RemovedRegionIsNotCurrentAndStillNeverWrong) {
  calls().put(range(0, 4));
  const auto reader = open_reader();
  const auto slots = slots_of(*reader, 4);
  store_.reset();
  for (const auto suffix : {kSlotsSuffix, kTableSuffix})
    ASSERT_TRUE(files().remove(base_path(options_) + std::string(suffix)));
  EXPECT_FALSE(reader->is_current());
  store_ = FlashStore::open(options_, files()).value();
  calls().put(range(10, 14));
  EXPECT_FALSE(reader->is_current());
  for (const auto& [number, slot] : slots) EXPECT_EQ(read(*reader, slot, number), Code::kOk);
}

TEST_P(Reader, WhatCannotBeReadSaysWhy) {
  const auto code_of = [&](const RegionReader::Options& options) {
    const auto reader = RegionReader::open(files(), options);
    return reader ? Code::kOk : reader.error().code;
  };
  Digest other{};
  other[0] = std::byte{1};
  EXPECT_EQ(code_of({.base_path = base_path(options_) + "7"}), Code::kNotFound);
  EXPECT_EQ(code_of({.base_path = base_path(options_), .name_space = other}), Code::kInvalid);
  auto table = files().open(base_path(options_) + std::string(kTableSuffix), {}).value();
  const auto write = [&](const TableHeader& header) {
    ASSERT_TRUE(os::write_bytes(*table, encode_header(header), 0));
  };
  write({.version = 2, .name_space = options_.name_space, .page_bytes = 7, .slot_bytes = 7});
  EXPECT_EQ(code_of({.base_path = base_path(options_)}), Code::kUnsupported);
  write({.name_space = options_.name_space, .page_bytes = 5000, .slot_bytes = 5000});
  EXPECT_EQ(code_of({.base_path = base_path(options_)}), Code::kCorrupt);
}

TEST_P(Reader, DamagedHeaderIsPutTogetherFromRecords) {
  calls().put(range(0, 4));
  auto table = files().open(base_path(options_) + std::string(kTableSuffix), {}).value();
  ASSERT_TRUE(os::write_bytes(*table, std::array{std::byte{'x'}}, 20));
  const auto blind = RegionReader::open(files(), {.base_path = base_path(options_)});
  ASSERT_FALSE(blind);
  EXPECT_EQ(blind.error().code, Code::kCorrupt);
  const auto reader =
      RegionReader::open(files(), {.base_path = base_path(options_), .name_space = options_.name_space});
  ASSERT_TRUE(reader) << reader.error().message;
  EXPECT_TRUE((*reader)->header_damaged());
  EXPECT_EQ((*reader)->header().page_bytes, kPageBytes);
  EXPECT_EQ(slots_of(**reader, 4).size(), 4u);
}

INSTANTIATE_TEST_SUITE_P(Disks, Reader, ::testing::Bool(),
                         [](const auto& kind) { return kind.param ? "Simulated" : "Real"; });

TEST(ReaderOfABadDisk, AnswersThePageOrAnErrorAndNeverWrongBytes) {
  SimDisk disk({.seed = 5, .direct_align_bytes = 512});
  const FlashOptions options = testing::small_options("/store", kPageBytes, 64 * kPageBytes);
  auto store = FlashStore::open(options, disk).value();
  StoreCalls{*store, kPageBytes}.put(range(0, 30));
  const auto reader = RegionReader::open(disk, {.base_path = base_path(options)}).value();
  const auto slots = slots_of(*reader, 30);
  disk.set_faults({.path_suffix = ".slots", .read_error_1_in = 5, .bit_rot_1_in = 7});
  std::map<Code, int> seen;
  for (int round = 0; round < 5; ++round) {
    for (const auto& [number, slot] : slots) ++seen[read(*reader, slot, number)];
  }
  EXPECT_GT(seen[Code::kOk], 0);
  EXPECT_GT(seen[Code::kCorrupt], 0);
  EXPECT_GT(seen[Code::kIo], 0);
  EXPECT_EQ(seen[Code::kUnsupported], 0);
}

TEST(ReaderOfShortFiles, MissesWhatIsCutOffAndGoesOn) {
  const testing::TempDirectory directory;
  const FlashOptions options = testing::small_options(directory.path(), kPageBytes, 64 * kPageBytes);
  auto store = FlashStore::open(options).value();
  StoreCalls{*store, kPageBytes}.put(range(0, 16));
  store.reset();
  const auto reader = RegionReader::open(os::posix_file_system(), {.base_path = base_path(options)}).value();
  const auto slots = slots_of(*reader, 16);
  std::filesystem::resize_file(base_path(options) + ".slots", 8 * kPageBytes + 100);
  std::filesystem::resize_file(base_path(options) + ".table", record_offset(12) + 10);
  for (const auto& [number, slot] : slots) {
    const std::uint32_t place = index::to_number(slot);
    const Code expected = place < 8 ? Code::kOk : place < 12 ? Code::kCorrupt : Code::kNotFound;
    EXPECT_EQ(read(*reader, slot, number), expected) << place;
  }
  std::filesystem::resize_file(base_path(options) + ".table", 0);
  EXPECT_EQ(read(*reader, slots.at(0), 0), Code::kNotFound);
  EXPECT_EQ(reader->num_records().value(), 0u);
}

// A process that puts pages 0, 1, 2, ... round and round, until it is killed.
pid_t start_writer(const FlashOptions& options, std::uint64_t num_pages, int ready) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  auto store = FlashStore::open(options);
  if (!store) ::_exit(3);
  const StoreCalls calls{**store, kPageBytes};
  for (std::uint64_t next = 0;; next = (next + 10) % num_pages) {
    calls.put(range(next, next + 10));
    if (::write(ready, "x", 1) != 1) ::_exit(4);
  }
}

TEST(ReaderOfAProcess, StoppedOrKilledWriterHarmsNoReader) {
  constexpr std::uint64_t kNumPages = 200;
  base::Prng prng(11);
  for (int round = 0; round < 8; ++round) {
    const testing::TempDirectory directory;
    const FlashOptions options = testing::small_options(directory.path(), kPageBytes, 64 * kPageBytes);
    int pipe[2];
    ASSERT_EQ(::pipe(pipe), 0);
    const pid_t writer = start_writer(options, kNumPages, pipe[1]);
    ::close(pipe[1]);
    char byte = 0;
    for (std::uint64_t i = 5 + prng.below(40); i-- > 0;) ASSERT_EQ(::read(pipe[0], &byte, 1), 1);
    const auto reader =
        RegionReader::open(os::posix_file_system(), {.base_path = base_path(options)}).value();
    for (const int signal : {SIGSTOP, SIGKILL}) {
      ASSERT_EQ(::kill(writer, signal), 0);
      int status = 0;
      ASSERT_EQ(::waitpid(writer, &status, WUNTRACED), writer);
      std::size_t num_read = 0;
      for (const auto& [number, slot] : slots_of(*reader, kNumPages)) {
        EXPECT_EQ(read(*reader, slot, number), Code::kOk) << "what stands still is read whole";
        ++num_read;
      }
      EXPECT_GT(num_read, 0u);
    }
    ::close(pipe[0]);
    // The next process adopts the region; the reader goes on with the same files.
    auto store = FlashStore::open(options).value();
    StoreCalls{*store, kPageBytes}.put(range(1000, 1010));
    EXPECT_TRUE(reader->is_current());
    EXPECT_EQ(slots_of(*reader, 1010).count(1009), 1u);
  }
}

}  // namespace
}  // namespace tpusync::flash
