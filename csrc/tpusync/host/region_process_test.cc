// Real processes that are killed and stopped at moments drawn from a seed, against a model in shared memory.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <set>
#include <thread>

#include "tpusync/host/peer_region.h"
#include "tpusync/host/registry.h"
#include "tpusync/host/testing.h"

namespace tpusync::host {
namespace {

using base::Code;
using index::PageKey;
using index::SlotId;
using namespace testing;

constexpr std::uint64_t kNumSlots = 24;
constexpr std::uint64_t kNumNumbers = 64;  // keys are those of 0 to 63

// What processes tell each other. Atomics of this kind work across processes.
struct Board {
  std::atomic<std::uint64_t> num_steps{0};
  std::atomic<int> allocating{0};  // pages that an alloc in flight may evict
  std::atomic<unsigned char> sealed[kNumNumbers] =
      {};  // acknowledged, and not evicted as far as the writer knows
  std::atomic<std::uint64_t> num_reads{0};
  std::atomic<std::uint64_t> num_wrong{0};
  std::atomic<int> num_open{0};
};

class SharedBoard {
 public:
  SharedBoard()
      : board_(new (::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
                   Board) {}
  ~SharedBoard() { ::munmap(board_, sizeof(Board)); }
  Board* operator->() const { return board_; }
  Board& operator*() const { return *board_; }

 private:
  Board* board_;
};

// A child that runs `body` and must be ended by the test.
class Child {
 public:
  explicit Child(const std::function<void()>& body) : id_(::fork()) {
    if (id_ != 0) return;
    body();
    ::_exit(0);
  }
  ~Child() { end(); }
  void signal(int number) const { ::kill(id_, number); }
  // Stops it, and returns when it stands still.
  void stop() const {
    signal(SIGSTOP);
    int status = 0;
    ::waitpid(id_, &status, WUNTRACED);
  }
  void end() {
    if (id_ <= 0) return;
    signal(SIGKILL);
    wait();
  }
  int wait() {
    int status = 0;
    ::waitpid(id_, &status, 0);
    id_ = -1;
    return status;
  }

 private:
  pid_t id_;
};

// A delay of no particular length: a moment, not a synchronisation.
void spin(std::uint64_t num_turns) {
  std::atomic<std::uint64_t> turn{0};
  while (turn.fetch_add(1, std::memory_order_relaxed) < num_turns) {
  }
}

void wait_for(const std::function<bool()>& condition) {
  while (!condition()) std::this_thread::yield();
}

std::unique_ptr<Region> open_in(const std::string& root, std::uint64_t num_slots = kNumSlots) {
  auto region = open_region(options_in(root, small_geometry(num_slots)));
  return region ? std::move(*region) : nullptr;
}

// Prefixes of up to 8 pages: pages 8k to 8k+7 are one chain. Writes for ever.
void write_for_ever(const std::string& root, Board& board, std::uint64_t seed) {
  const auto region = open_in(root);
  if (!region) ::_exit(3);
  base::Prng prng(seed);
  std::vector<std::vector<SlotId>> held;
  board.num_open.fetch_add(1);
  while (true) {
    const std::uint64_t head = prng.below(kNumNumbers / 8) * 8;
    const std::size_t count = 1 + prng.below(8);
    board.allocating.store(static_cast<int>(count));
    const std::vector<SlotId> slots = region->alloc(count);
    for (std::uint64_t i = 0; i < kNumNumbers; ++i) {
      if (!region->contains(key_of(i))) board.sealed[i].store(0);
    }
    board.allocating.store(0);
    if (!slots.empty()) {
      for (std::size_t i = 0; i < count; ++i) fill_page(*region, slots[i], head + i);
      region->seal({}, keys_of(head, count), slots);
      for (std::uint64_t i = head; i < head + count; ++i) {
        if (region->contains(key_of(i))) board.sealed[i].store(1);
      }
      held.push_back(slots);
    }
    if (slots.empty() || prng.one_in(2)) {
      if (held.empty()) continue;
      const std::size_t victim = prng.below(held.size());
      (void)region->free(held[victim]);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(victim));
    }
    board.num_steps.fetch_add(1);
  }
}

// Reads every region of the namespace for ever.
void read_for_ever(const std::string& root, Board& board, std::uint64_t seed) {
  base::Prng prng(seed);
  PageBuffer buffer(small_geometry(kNumSlots));
  board.num_open.fetch_add(1);
  while (true) {
    for (const Registry::Entry& entry : Registry::open(root)->entries_of(digest_of(1))) {
      const auto peer = PeerRegion::open(entry.path, digest_of(1));
      if (!peer) continue;
      for (int i = 0; i < 50; ++i) {
        const std::uint64_t number = prng.below(kNumNumbers);
        const auto found = (*peer)->find(key_of(number));
        if (!found || !(*peer)->copy(*found, key_of(number), buffer.to())) continue;
        board.num_reads.fetch_add(1);
        if (!buffer.is_page(number)) board.num_wrong.fetch_add(1);
      }
    }
  }
}

class Seeded : public ::testing::TestWithParam<std::uint64_t> {
 protected:
  MemoryDirectory directory_;
  SharedBoard board_;
};

TEST_P(Seeded, AWriterKilledAtAnyMomentLeavesEveryAcknowledgedPageAndNoWrongOne) {
  base::Prng prng(GetParam());
  for (int life = 0; life < 4; ++life) {
    const std::uint64_t steps = board_->num_steps + 1 + prng.below(60);
    const std::uint64_t seed = prng.next();
    const std::uint64_t jitter = prng.below(4000);
    {
      Child writer([&] { write_for_ever(directory_.path(), *board_, seed); });
      wait_for([&] { return board_->num_steps >= steps; });
      spin(jitter);
      writer.end();
    }
    const auto region = open_in(directory_.path());
    ASSERT_TRUE(region);
    EXPECT_EQ(region->file().state().epoch, static_cast<std::uint64_t>(2 * life + 2))
        << "it adopts, it does not make";
    int num_missing = 0;
    PageBuffer buffer(region->geometry());
    for (std::uint64_t number = 0; number < kNumNumbers; ++number) {
      const auto seal = region->get(key_of(number), buffer.to());
      if (seal) {
        EXPECT_TRUE(buffer.is_page(number)) << number;
      } else {
        EXPECT_EQ(seal.error().code, Code::kNotFound) << number;
        num_missing += board_->sealed[number];
      }
    }
    // Only an alloc that was under way may have taken pages that the model still has.
    EXPECT_LE(num_missing, board_->allocating);
    EXPECT_EQ(region->num_available(), kNumSlots);
    EXPECT_TRUE(region->consistent());
    for (std::uint64_t number = 0; number < kNumNumbers; ++number) {
      board_->sealed[number] = region->contains(key_of(number));
    }
    board_->allocating = 0;
  }
}

TEST_P(Seeded, ReadersStoppedAndKilledAtAnyMomentNeverReadAWrongPageNorHoldUpTheWriter) {
  base::Prng prng(GetParam());
  Child writer([&] { write_for_ever(directory_.path(), *board_, 1); });
  wait_for([&] { return board_->num_open == 1; });
  Child reader([&] { read_for_ever(directory_.path(), *board_, 2); });
  Child doomed([&] { read_for_ever(directory_.path(), *board_, 3); });
  wait_for([&] { return board_->num_reads > 20; });
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t reads = board_->num_reads + prng.below(20);
    wait_for([&] { return board_->num_reads >= reads; });
    reader.stop();
    if (round == 5) doomed.end();
    const std::uint64_t steps = board_->num_steps + 40;  // each slot has been used again by then
    wait_for([&] { return board_->num_steps >= steps; });
    reader.signal(SIGCONT);
  }
  const std::uint64_t reads = board_->num_reads + 50;
  wait_for([&] { return board_->num_reads >= reads; });
  EXPECT_EQ(board_->num_wrong, 0u);
}

TEST_P(Seeded, AStoppedWritersPagesAreReadAndItsRegionIsTakenOnlyOnceItIsDead) {
  base::Prng prng(GetParam());
  Child writer([&] { write_for_ever(directory_.path(), *board_, prng.next()); });
  const std::uint64_t steps = 20 + prng.below(30);
  wait_for([&] { return board_->num_steps >= steps; });
  writer.stop();
  Child reader([&] { read_for_ever(directory_.path(), *board_, 2); });
  wait_for([&] { return board_->num_reads >= 50; });
  const Registry registry = Registry::open(directory_.path()).value();
  {
    const auto other = open_in(directory_.path());
    ASSERT_TRUE(other);
    EXPECT_EQ(other->file().file().path(), registry.path_of(digest_of(1), 1));
    EXPECT_EQ(registry.entries().size(), 2u);
    writer.end();
    const auto taken = open_in(directory_.path());
    ASSERT_TRUE(taken);
    EXPECT_EQ(taken->file().file().path(), registry.path_of(digest_of(1), 0));
  }
  const std::uint64_t reads = board_->num_reads + 50;
  wait_for([&] { return board_->num_reads >= reads; });
  EXPECT_EQ(board_->num_wrong, 0u);
}

TEST_P(Seeded, ManyProcessesThatOpenAtOnceGetARegionEachAndNeverLeaveMore) {
  constexpr int kNumProcesses = 5;
  base::Prng prng(GetParam());
  for (int life = 0; life < 3; ++life) {
    board_->num_open = 0;
    std::vector<std::unique_ptr<Child>> children;
    for (int i = 0; i < kNumProcesses; ++i) {
      const std::uint64_t seed = prng.next();
      children.push_back(
          std::make_unique<Child>([&, seed] { write_for_ever(directory_.path(), *board_, seed); }));
    }
    // One of them dies while it opens, or soon after.
    spin(prng.below(1000000));
    children.front()->end();
    wait_for([&] { return board_->num_open >= kNumProcesses - 1; });
    const auto entries = Registry::open(directory_.path())->entries();
    EXPECT_GE(entries.size(), std::size_t{kNumProcesses - 1});
    // A region that died half made is in the way of nobody, and goes with the next one that looks.
    EXPECT_LE(entries.size(), std::size_t{kNumProcesses + 1});
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Seeded, ::testing::Range<std::uint64_t>(0, 6));

}  // namespace
}  // namespace tpusync::host
