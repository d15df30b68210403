// Engines on a real file: transfers of every shape, from memory that is registered, in part, or not at all.
#include "tpusync/flash/io_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "tpusync/base/bytes.h"
#include "tpusync/base/prng.h"
#include "tpusync/os/aligned_buffer.h"
#include "tpusync/testing/store_harness.h"

namespace tpusync::flash {
namespace {

constexpr std::size_t kMemoryBytes = 24 * base::kMiB;
constexpr std::size_t kFileBytes = kMemoryBytes;

// Transfers whose pieces follow each other in memory from `memory` on, with a gap behind each.
class Job final : public IoJob {
 public:
  struct Step {
    std::uint64_t offset = 0;
    std::vector<std::uint64_t> lengths;  // of its pieces
  };

  Job(bool is_write, std::byte* memory, std::size_t gap_bytes, std::vector<Step> steps)
      : is_write_(is_write), steps_(std::move(steps)), pieces_(steps_.size()), num_completed_(steps_.size()) {
    std::byte* at = memory;
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      for (const std::uint64_t length : steps_[i].lengths) {
        pieces_[i].push_back({at, length});
        at += length + gap_bytes;
      }
    }
  }

  std::size_t size() const override { return steps_.size(); }
  bool prepare(std::size_t i, Io& io) override {
    io = {.is_write = is_write_, .offset = steps_[i].offset, .pieces = pieces_[i]};
    return true;
  }
  void complete(std::size_t i, base::Status status) override {
    ++num_completed_[i];
    if (!status) failures.push_back(status.error().message);
  }

  bool completed_once() const {
    return std::all_of(num_completed_.begin(), num_completed_.end(), [](int n) { return n == 1; });
  }
  std::vector<std::string> failures;

 private:
  const bool is_write_;
  const std::vector<Step> steps_;
  std::vector<std::vector<iovec>> pieces_;
  std::vector<int> num_completed_;
};

enum class Registered : unsigned char { kNone, kHalf, kAll };
struct Case {
  std::string name;
  IoKind io;
  Registered registered;
};

class Engine : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    auto opened =
        os::posix_file_system().open(directory_.path() + "/slots", {.create = true, .direct = true});
    ASSERT_TRUE(opened) << opened.error().message;
    file_ = std::move(*opened);
    ASSERT_TRUE(file_->allocate(kFileBytes));
    std::fill(target_.bytes().begin(), target_.bytes().end(), std::byte{0});
    base::Prng prng(7);
    for (std::size_t i = 0; i < kMemoryBytes; i += 8) {
      const std::uint64_t word = prng.next();
      std::memcpy(source_.bytes().data() + i, &word, 8);
    }
    std::vector<std::span<std::byte>> memory;
    for (os::AlignedBuffer* buffer : {&source_, &target_}) {
      const std::size_t part = GetParam().registered == Registered::kHalf ? kMemoryBytes / 2 : kMemoryBytes;
      if (GetParam().registered != Registered::kNone) memory.push_back(buffer->bytes().first(part));
    }
    auto engine = make_engine(GetParam().io, *file_, memory);
    if (!engine && GetParam().io == IoKind::kUring) GTEST_SKIP() << engine.error().message;
    ASSERT_TRUE(engine);
    engine_ = std::move(*engine);
  }

  // Writes and reads back, each piece `gap_bytes` behind the other.
  void round_trip(const std::vector<Job::Step>& steps, std::size_t gap_bytes) {
    Job write(true, source_.bytes().data(), gap_bytes, steps);
    engine_->run(*file_, write);
    ASSERT_TRUE(write.failures.empty()) << write.failures.front();
    EXPECT_TRUE(write.completed_once());
    Job read(false, target_.bytes().data(), gap_bytes, steps);
    engine_->run(*file_, read);
    ASSERT_TRUE(read.failures.empty()) << read.failures.front();
    EXPECT_TRUE(read.completed_once());
    std::size_t at = 0;
    for (const Job::Step& step : steps) {
      for (const std::uint64_t length : step.lengths) {
        ASSERT_EQ(std::memcmp(source_.bytes().data() + at, target_.bytes().data() + at, length), 0) << at;
        const auto gap = target_.bytes().subspan(at + length, gap_bytes);
        ASSERT_TRUE(std::all_of(gap.begin(), gap.end(), [](std::byte b) { return b == std::byte{0}; })) << at;
        at += length + gap_bytes;
      }
    }
  }

  testing::TempDirectory directory_;
  std::unique_ptr<os::File> file_;
  os::AlignedBuffer source_{kMemoryBytes}, target_{kMemoryBytes};
  std::unique_ptr<IoEngine> engine_;
};

std::vector<Job::Step> steps_of(std::size_t count, const std::vector<std::uint64_t>& lengths) {
  const std::uint64_t bytes = std::accumulate(lengths.begin(), lengths.end(), std::uint64_t{0});
  std::vector<Job::Step> steps;
  for (std::size_t i = 0; i < count; ++i) steps.push_back({(count - 1 - i) * bytes, lengths});
  return steps;
}

TEST_P(Engine, SaysWhatIsRegistered) {
  const bool uring = engine_->name() == "uring";
  if (GetParam().registered == Registered::kNone || !uring) {
    EXPECT_EQ(engine_->num_registered_bytes(), 0u);
  } else if (engine_->num_registered_bytes() != 0) {  // 0: the limit on locked memory
    EXPECT_EQ(engine_->num_registered_bytes(),
              GetParam().registered == Registered::kAll ? 2 * kMemoryBytes : kMemoryBytes);
  }
}

TEST_P(Engine, MoreTransfersThanFitInFlight) {
  round_trip(steps_of(1000, {4096}), 0);
}

TEST_P(Engine, LargePiecesThatLieApart) {
  round_trip(steps_of(40, {base::kMiB / 8, base::kMiB / 4}), 4096);
}

TEST_P(Engine, SmallPiecesThatLieApart) {
  round_trip(steps_of(50, std::vector<std::uint64_t>(40, 4096)), 4096);
}

TEST_P(Engine, MorePiecesThanFitInFlight) {
  round_trip(steps_of(1, std::vector<std::uint64_t>(100, 64 * base::kKiB)), 4096);
}

TEST_P(Engine, PiecesThatTouchAreOne) {
  round_trip(steps_of(8, {base::kMiB, base::kMiB}), 0);
}

TEST_P(Engine, AReadBehindTheEndIsAnErrorAndTheOthersAreNot) {
  auto steps = steps_of(4, {base::kMiB / 8, base::kMiB / 8});
  steps.push_back({kFileBytes - base::kMiB / 8, {base::kMiB / 8, base::kMiB / 8}});
  Job read(false, target_.bytes().data(), 4096, steps);
  engine_->run(*file_, read);
  EXPECT_TRUE(read.completed_once());
  EXPECT_EQ(read.failures.size(), 1u);
}

INSTANTIATE_TEST_SUITE_P(All, Engine,
                         ::testing::Values(Case{"threads", IoKind::kThreads, Registered::kNone},
                                           Case{"uring", IoKind::kUring, Registered::kNone},
                                           Case{"uring_half_registered", IoKind::kUring, Registered::kHalf},
                                           Case{"uring_registered", IoKind::kUring, Registered::kAll}),
                         [](const auto& one) { return one.param.name; });

}  // namespace
}  // namespace tpusync::flash
