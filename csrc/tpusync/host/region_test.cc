#include "tpusync/host/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <thread>

#include "tpusync/host/peer_region.h"
#include "tpusync/host/testing.h"

namespace tpusync::host {
namespace {

using base::Code;
using index::PageKey;
using index::SlotId;
using namespace testing;

class RegionTest : public ::testing::Test {
 protected:
  std::unique_ptr<Region> open(std::uint64_t num_slots) {
    auto region = open_region(options_in(directory_.path(), small_geometry(num_slots)));
    EXPECT_TRUE(region) << region.error().message;
    return region ? std::move(*region) : nullptr;
  }
  static std::uint64_t count(const Region& region, std::string_view name) {
    return metrics::value_of(region.samples(), name);
  }
  // What a reader of another process gets.
  static Code peer_get(const Region& region, std::uint64_t number) {
    const auto peer = PeerRegion::open(region.file().file().path(), digest_of(1));
    if (!peer) return peer.error().code;
    const auto found = (*peer)->find(key_of(number));
    if (!found) return Code::kNotFound;
    PageBuffer buffer(region.geometry());
    const auto copied = (*peer)->copy(*found, key_of(number), buffer.to());
    if (!copied) return copied.error().code;
    EXPECT_TRUE(buffer.is_page(number));
    return Code::kOk;
  }
  static bool get(Region& region, std::uint64_t number) {
    PageBuffer buffer(region.geometry());
    const auto seal = region.get(key_of(number), buffer.to());
    EXPECT_TRUE(!seal || buffer.is_page(number));
    return seal.has_value();
  }
  MemoryDirectory directory_;
};

TEST_F(RegionTest, SealedPagesAreReadInUseAndAfterFreeUntilTheSlotIsAllocated) {
  const auto region = open(8);
  const std::vector<SlotId> slots = put_pages(*region, 0, 4);
  ASSERT_EQ(slots.size(), 4u);
  EXPECT_TRUE(get(*region, 2));
  EXPECT_EQ(peer_get(*region, 2), Code::kOk);
  ASSERT_TRUE(region->free(slots));
  EXPECT_EQ(region->match(keys_of(0, 6)), 4u);
  EXPECT_TRUE(get(*region, 3));
  EXPECT_EQ(peer_get(*region, 3), Code::kOk);
  ASSERT_EQ(region->alloc(5).size(), 5u);  // four blank ones and the deepest page
  EXPECT_EQ(region->match(keys_of(0, 6)), 3u);
  EXPECT_FALSE(get(*region, 3));
  EXPECT_EQ(peer_get(*region, 3), Code::kNotFound);
  EXPECT_TRUE(region->consistent());
}

TEST_F(RegionTest, AllocIsAllOrNothing) {
  const auto region = open(4);
  EXPECT_TRUE(region->alloc(5).empty());
  EXPECT_EQ(region->num_available(), 4u);
  EXPECT_EQ(region->alloc(4).size(), 4u);
  EXPECT_TRUE(region->alloc(1).empty());
}

TEST_F(RegionTest, PagesLieWhereATensorOfPiecesAndSlotsHasThem) {
  const auto region = open(4);
  const std::vector<SlotId> slots = put_pages(*region, 0, 4);
  for (const SlotId slot : slots) {
    for (std::size_t piece = 0; piece < 2; ++piece) {
      EXPECT_EQ(region->piece(slot, piece).data(),
                region->payload().data() + (piece * 4 + index::to_number(slot)) * 4096);
    }
  }
}

TEST_F(RegionTest, LeavesAreEvictedBeforeTheirAncestors) {
  const auto region = open(6);
  const std::vector<SlotId> head = put_pages(*region, 0, 2);
  const std::vector<SlotId> first = put_pages(*region, 10, 2, keys_of(0, 2));
  const std::vector<SlotId> second = put_pages(*region, 20, 2, keys_of(0, 2));
  // The ancestors go first here; their descendants still must not outlive them.
  ASSERT_TRUE(region->free(head));
  ASSERT_TRUE(region->free(first));
  ASSERT_TRUE(region->free(second));
  std::vector<PageKey> expected{key_of(11), key_of(10), key_of(21), key_of(20), key_of(1), key_of(0)};
  EXPECT_EQ(region->oldest(6), expected);
  region->touch(keys_of(0, 2), keys_of(10, 1));
  expected = {key_of(11), key_of(21), key_of(20), key_of(10), key_of(1), key_of(0)};
  EXPECT_EQ(region->oldest(6), expected);
}

TEST_F(RegionTest, FreeAllKeepsPagesInTheOrderOfTheirTouches) {
  const auto region = open(8);
  put_pages(*region, 0, 3);
  put_pages(*region, 10, 3);
  region->touch({}, keys_of(0, 3));
  region->free_all();
  EXPECT_EQ(region->num_available(), 8u);
  const std::vector<PageKey> expected{key_of(12), key_of(11), key_of(10), key_of(2), key_of(1), key_of(0)};
  EXPECT_EQ(region->oldest(8), expected);
}

TEST_F(RegionTest, ASlotThatIsFreedTwiceIsRefusedAndNothingChanges) {
  const auto region = open(4);
  const std::vector<SlotId> slots = put_pages(*region, 0, 2);
  ASSERT_TRUE(region->free(std::span(slots).first(1)));
  EXPECT_EQ(region->free(slots).error().code, Code::kInvalid);
  EXPECT_EQ(region->num_available(), 3u);
  EXPECT_EQ(region->free(std::vector<SlotId>{SlotId{99}}).error().code, Code::kInvalid);
}

TEST_F(RegionTest, ASealMovesFromAFreedSlotToTheOneInUse) {
  const auto region = open(4);
  const std::vector<SlotId> old_slots = put_pages(*region, 0, 1);
  ASSERT_TRUE(region->free(old_slots));
  const std::vector<SlotId> slots = region->alloc(1);
  fill_page(*region, slots[0], 0);
  EXPECT_EQ(region->seal({}, keys_of(0, 1), slots)[0], Code::kOk);
  EXPECT_EQ(region->find(key_of(0))->slot, slots[0]);
  EXPECT_EQ(count(*region, "host_pages_sealed"), 1u);
  EXPECT_TRUE(region->consistent());
}

TEST_F(RegionTest, ASecondSlotInUseWithTheSamePageStaysUnsealed) {
  const auto region = open(4);
  const SlotId first = put_pages(*region, 0, 1)[0];
  const SlotId second = put_pages(*region, 0, 1)[0];
  EXPECT_EQ(region->find(key_of(0))->slot, first);
  ASSERT_TRUE(region->free(std::vector<SlotId>{second}));
  EXPECT_TRUE(region->consistent());
  EXPECT_TRUE(get(*region, 0));
}

TEST_F(RegionTest, SealOfASlotThatIsNotInUseIsRefused) {
  const auto region = open(4);
  EXPECT_EQ(region->seal({}, keys_of(0, 2), std::vector<SlotId>{SlotId{0}, SlotId{44}}),
            (std::vector<Code>{Code::kInvalid, Code::kInvalid}));
  EXPECT_EQ(region->match(keys_of(0, 1)), 0u);
}

TEST_F(RegionTest, APageThatArrivesAfterItsSlotWasFreedAndTakenAgainIsNotSealed) {
  const auto region = open(1);
  const std::vector<SlotId> slots = region->alloc(1);
  const SlotUse use = region->begin_write(slots).value()[0];
  ASSERT_TRUE(region->free(slots));
  ASSERT_EQ(region->alloc(1), slots);
  fill_page(*region, slots[0], 7);  // another owner's
  EXPECT_EQ(region->seal_bytes(key_of(0), {}, use), Code::kCancelled);
  EXPECT_EQ(region->seal_known(key_of(0), {}, use, 1), Code::kCancelled);
  EXPECT_FALSE(region->contains(key_of(0)));
  EXPECT_EQ(count(*region, "host_seals_cancelled_total"), 2u);
  EXPECT_EQ(region->seal_bytes(key_of(7), {}, region->begin_write(slots).value()[0]), Code::kOk);
  EXPECT_TRUE(get(*region, 7));
  EXPECT_EQ(count(*region, "host_sealed_bytes_total"), region->geometry().page_bytes());
  EXPECT_TRUE(region->consistent());
}

TEST_F(RegionTest, BeforeBytesArriveWhatTheirSlotsHeldIsGone) {
  const auto region = open(4);
  const std::vector<SlotId> slots = put_pages(*region, 0, 2);
  EXPECT_EQ(region->begin_write(std::vector<SlotId>{slots[0], slots[0]}).error().code, Code::kInvalid);
  EXPECT_EQ(region->begin_write(std::vector<SlotId>{slots[0], SlotId{3}}).error().code, Code::kInvalid);
  EXPECT_EQ(region->begin_write(std::vector<SlotId>{SlotId{44}}).error().code, Code::kInvalid);
  EXPECT_EQ(region->match(keys_of(0, 2)), 2u);
  const auto uses = region->begin_write(std::span(slots).first(1));
  ASSERT_TRUE(uses);
  EXPECT_FALSE(region->contains(key_of(0)));
  EXPECT_TRUE(region->contains(key_of(1)));
  fill_page(*region, slots[0], 5);
  EXPECT_EQ(region->seal_bytes(key_of(5), {}, (*uses)[0]), Code::kOk);
  EXPECT_EQ(peer_get(*region, 5), Code::kOk);
  EXPECT_TRUE(region->consistent());
}

TEST_F(RegionTest, PagesOfAnEarlierProcessAreVerifiedAtTheirFirstReadAndOwnOnesWhenAsked) {
  {
    const auto region = open(4);
    put_pages(*region, 0, 2);
    PageBuffer buffer(region->geometry());
    ASSERT_TRUE(region->get(key_of(0), buffer.to()));
    EXPECT_EQ(count(*region, "host_pages_verified_total"), 0u);
    ASSERT_TRUE(region->get(key_of(0), buffer.to(), Verify::kAlways));
    ASSERT_TRUE(region->verify(key_of(0)));
    EXPECT_EQ(count(*region, "host_pages_verified_total"), 2u);
    region->piece(region->find(key_of(1))->slot, 0)[8] ^= std::byte{1};
    EXPECT_EQ(region->get(key_of(1), buffer.to(), Verify::kAlways).error().code, Code::kCorrupt);
    put_pages(*region, 1, 1);
  }
  const auto region = open(4);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(get(*region, 0));
    EXPECT_EQ(count(*region, "host_pages_verified_total"), 1u);
  }
  region->piece(region->find(key_of(1))->slot, 1)[8] ^= std::byte{1};
  PageBuffer buffer(region->geometry());
  EXPECT_EQ(region->get(key_of(1), buffer.to()).error().code, Code::kCorrupt);
  EXPECT_FALSE(region->contains(key_of(1)));
}

TEST_F(RegionTest, ADamagedPageIsAMissOnceAdoptedAndIsDropped) {
  {
    const auto region = open(4);
    const SlotId slot = put_pages(*region, 0, 2)[0];
    region->piece(slot, 1)[100] ^= std::byte{1};
    EXPECT_EQ(peer_get(*region, 0), Code::kCorrupt);
    EXPECT_EQ(peer_get(*region, 1), Code::kOk);
  }
  const auto region = open(4);
  PageBuffer buffer(region->geometry());
  EXPECT_EQ(region->get(key_of(0), buffer.to()).error().code, Code::kCorrupt);
  EXPECT_EQ(region->get(key_of(0), buffer.to()).error().code, Code::kNotFound);
  EXPECT_EQ(count(*region, "host_pages_corrupt_total"), 1u);
  EXPECT_TRUE(get(*region, 1));
  EXPECT_TRUE(region->consistent());
}

TEST_F(RegionTest, AdoptionKeepsSealedPagesInOrderAndDropsTheRest) {
  std::vector<PageKey> order;
  {
    const auto region = open(8);
    put_pages(*region, 0, 3);
    put_pages(*region, 10, 2, keys_of(0, 1));
    ASSERT_EQ(region->alloc(1).size(), 1u);  // in use, not sealed
  }
  const auto region = open(8);
  EXPECT_EQ(count(*region, "host_pages_adopted_total"), 5u);
  EXPECT_EQ(region->num_available(), 8u);
  EXPECT_EQ(region->match(keys_of(0, 3)), 3u);
  for (std::uint64_t number : {0, 1, 2, 10, 11}) EXPECT_TRUE(get(*region, number)) << number;
  const std::vector<PageKey> expected{key_of(2), key_of(1), key_of(11), key_of(10), key_of(0)};
  EXPECT_EQ(region->oldest(8), expected);
  EXPECT_TRUE(region->consistent());
}

TEST_F(RegionTest, EveryDamagedRecordIsDroppedAtAdoption) {
  std::string path;
  std::uint64_t at = 0;
  {
    const auto region = open(8);
    put_pages(*region, 0, 8);
    path = region->file().file().path();
    at = kHeaderBytes + index::to_number(region->find(key_of(5))->slot) * kSealBytes;
  }
  const int descriptor = ::open(path.c_str(), O_RDWR);
  ASSERT_GE(descriptor, 0);
  const unsigned char byte = 0x5a;
  ASSERT_EQ(::pwrite(descriptor, &byte, 1, static_cast<off_t>(at + 13)), 1);
  ::close(descriptor);
  const auto region = open(8);
  EXPECT_EQ(count(*region, "host_pages_adopted_total"), 7u);
  EXPECT_EQ(count(*region, "host_records_damaged_total"), 1u);
  EXPECT_EQ(region->match(keys_of(0, 8)), 5u);
  EXPECT_TRUE(region->consistent());
}

TEST_F(RegionTest, GenerationsNeverReturn) {
  std::uint64_t last = 0;
  for (int run = 0; run < 5; ++run) {
    const auto region = open(4);
    for (int i = 0; i < 3; ++i) {
      const std::vector<SlotId> slots = put_pages(*region, 100 * run + i, 1);
      const std::uint64_t generation = region->find(key_of(100 * run + i))->seal.generation;
      EXPECT_GT(generation, last);
      last = generation;
      ASSERT_TRUE(region->free(slots));
    }
    ASSERT_EQ(region->alloc(4).size(), 4u);  // retracts all
  }
}

TEST_F(RegionTest, CapacityShrinksAndGrowsAndPagesThatStillHaveASlotStay) {
  {
    put_pages(*open(16), 0, 12);
  }
  {
    const auto region = open(8);
    EXPECT_EQ(count(*region, "host_pages_adopted_total"), 8u);
    EXPECT_EQ(region->match(keys_of(0, 12)), 8u);
    for (std::uint64_t i = 0; i < 8; ++i) EXPECT_TRUE(get(*region, i));
    EXPECT_EQ(peer_get(*region, 7), Code::kOk);
    EXPECT_EQ(peer_get(*region, 8), Code::kNotFound);
  }
  const auto region = open(32);
  EXPECT_EQ(count(*region, "host_pages_adopted_total"), 8u);
  EXPECT_EQ(put_pages(*region, 100, 24).size(), 24u);
  for (std::uint64_t i = 0; i < 8; ++i) EXPECT_TRUE(get(*region, i));
  EXPECT_EQ(peer_get(*region, 120), Code::kOk);
  EXPECT_TRUE(region->consistent());
}

TEST_F(RegionTest, ShrinkingGivesMemoryBackUnlessAReaderMapsIt) {
  constexpr std::uint64_t kPieceBytes = 64 * base::kKiB;
  const auto open_with = [&](std::uint64_t num_slots) {
    return open_region(options_in(directory_.path(), small_geometry(num_slots, kPieceBytes))).value();
  };
  const auto memory_of = [](const Region& region) { return region.file().file().info()->memory_bytes; };
  std::unique_ptr<PeerRegion> reader;
  std::uint64_t full_bytes = 0;
  {
    const auto region = open_with(256);
    put_pages(*region, 0, 256);
    full_bytes = memory_of(*region);
    reader = PeerRegion::open(region->file().file().path(), digest_of(1)).value();
  }
  const auto found = reader->find(key_of(200));
  ASSERT_TRUE(found);
  {
    EXPECT_EQ(memory_of(*open_with(128)), full_bytes);
  }
  PageBuffer buffer(small_geometry(256, kPieceBytes));
  EXPECT_EQ(reader->copy(*found, key_of(200), buffer.to()).error().code, Code::kNotFound);
  reader.reset();
  EXPECT_EQ(memory_of(*open_with(128)), full_bytes - 128 * 2 * kPieceBytes);
}

TEST_F(RegionTest, APinnedPageOutlivesItsNeighbours) {
  const auto region = open(4);
  const std::vector<SlotId> slots = put_pages(*region, 0, 4);
  ASSERT_TRUE(region->free(slots));
  const auto firm = region->pin(key_of(3), PinKind::kFirm);
  const auto soft = region->pin(key_of(2), PinKind::kSoft);
  ASSERT_TRUE(firm && soft);
  EXPECT_EQ(region->num_available(), 3u);
  EXPECT_TRUE(region->alloc(4).empty());
  ASSERT_EQ(region->alloc(2).size(), 2u);
  EXPECT_TRUE(region->contains(key_of(2)));
  ASSERT_EQ(region->alloc(1).size(), 1u);
  EXPECT_FALSE(region->contains(key_of(2)));
  EXPECT_TRUE(get(*region, 3));
  region->unpin(*soft);
  region->unpin(*firm);
  EXPECT_EQ(region->alloc(1).size(), 1u);
}

TEST_F(RegionTest, RemoveAndClearDropPagesAndLeaveSlotsInUse) {
  const auto region = open(8);
  const std::vector<SlotId> slots = put_pages(*region, 0, 4);
  EXPECT_EQ(region->remove(keys_of(1, 9)), 3u);
  EXPECT_EQ(region->keys(), keys_of(0, 1));
  EXPECT_EQ(region->clear(), 1u);
  EXPECT_EQ(region->num_available(), 4u);
  EXPECT_TRUE(region->free(slots));
  EXPECT_TRUE(region->consistent());
}

TEST_F(RegionTest, ThreadsThatPutReadAndEvictAtOnceNeverReadAWrongPage) {
  const auto region = open(16);
  std::atomic<bool> stop = false;
  std::atomic<int> num_read = 0;
  std::vector<std::jthread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&, i] {
      const auto peer = PeerRegion::open(region->file().file().path(), digest_of(1)).value();
      base::Prng prng(i);
      PageBuffer buffer(region->geometry());
      while (!stop) {
        const std::uint64_t number = prng.below(40);
        const auto found = peer->find(key_of(number));
        if (!found || !peer->copy(*found, key_of(number), buffer.to())) continue;
        EXPECT_TRUE(buffer.is_page(number));
        num_read.fetch_add(1);
      }
    });
  }
  base::Prng prng(5);
  std::vector<std::vector<SlotId>> held;
  for (int step = 0; step < 3000 || num_read < 20; ++step) {
    const std::uint64_t first = prng.below(36);
    if (region->num_available() >= 4) {
      const std::vector<SlotId> slots = region->alloc(4);
      for (std::size_t i = 0; i < 4; ++i) fill_page(*region, slots[i], first + i);
      region->seal({}, keys_of(first, 4), slots);
      held.push_back(slots);
    }
    if (held.size() > 2) {
      ASSERT_TRUE(region->free(held.front()));
      held.erase(held.begin());
    }
  }
  stop = true;
  readers.clear();
  EXPECT_TRUE(region->consistent());
}

}  // namespace
}  // namespace tpusync::host
