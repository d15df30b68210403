#include "tpusync/host/slot_book.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <map>

#include "tpusync/base/prng.h"

namespace tpusync::host {
namespace {

using index::kNoSlot;
using index::SlotId;

TEST(SlotBook, TakesBlankSlotsFirstThenTheOldestPage) {
  SlotBook book(3);
  EXPECT_EQ(book.take(), SlotId{0});
  EXPECT_EQ(book.take(), SlotId{1});
  book.seal(SlotId{0});
  book.seal(SlotId{1});
  book.give_back(SlotId{1});
  book.give_back(SlotId{0});
  EXPECT_EQ(book.num_available(), 3u);
  EXPECT_EQ(book.take(), SlotId{2});
  EXPECT_EQ(book.take(), SlotId{1});
  EXPECT_EQ(book.take(), SlotId{0});
  EXPECT_EQ(book.take(), kNoSlot);
}

TEST(SlotBook, SoftPinsAreGivenUpLastAndFirmOnesNever) {
  SlotBook book(3);
  std::vector<Pin> pins;
  for (int i = 0; i < 3; ++i) book.seal(book.take());
  for (int i = 0; i < 3; ++i) book.give_back(SlotId(i));
  const Pin soft = book.pin(SlotId{0}, PinKind::kSoft);
  const Pin firm = book.pin(SlotId{1}, PinKind::kFirm);
  EXPECT_EQ(book.num_available(), 2u);
  EXPECT_EQ(book.take(), SlotId{2});
  EXPECT_TRUE(book.holds(soft));
  EXPECT_EQ(book.take(), SlotId{0});
  EXPECT_FALSE(book.holds(soft));
  EXPECT_EQ(book.take(), kNoSlot);
  book.unpin(soft);  // of a use that is over: nothing happens
  book.unpin(firm);
  EXPECT_EQ(book.take(), SlotId{1});
}

TEST(SlotBook, ClearFreesInTheOrderOfTheLastTouch) {
  SlotBook book(3);
  for (int i = 0; i < 3; ++i) book.seal(book.take());
  book.touch(SlotId{0});
  book.clear();
  EXPECT_EQ(book.take(), SlotId{1});
  EXPECT_EQ(book.take(), SlotId{2});
  EXPECT_EQ(book.take(), SlotId{0});
}

// The same, said with lists: slow and obvious.
class Model {
 public:
  explicit Model(std::uint32_t num_slots) : slots(num_slots) {}
  struct Slot {
    bool used = false, sealed = false;
    int num_soft = 0, num_firm = 0;
  };
  void place(std::uint32_t slot) {
    warm.remove(slot);
    waiting.remove(slot);
    const Slot& s = slots[slot];
    if (s.used || !s.sealed || s.num_firm > 0) return;
    (s.num_soft > 0 ? waiting : warm).push_back(slot);
  }
  bool is_blank(std::uint32_t slot) const { return !slots[slot].used && !slots[slot].sealed; }
  std::vector<Slot> slots;
  std::list<std::uint32_t> warm, waiting;
};

class SlotBookModel : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(SlotBookModel, AgreesWithTheModel) {
  base::Prng prng(GetParam());
  const std::uint32_t num_slots = 1 + static_cast<std::uint32_t>(prng.below(12));
  SlotBook book(num_slots);
  Model model(num_slots);
  std::vector<Pin> pins;
  for (int step = 0; step < 2000; ++step) {
    const auto slot = static_cast<std::uint32_t>(prng.below(num_slots));
    Model::Slot& s = model.slots[slot];
    switch (prng.below(8)) {
      case 0:
      case 1: {
        const SlotId taken = book.take();
        const bool any_blank = std::any_of(model.slots.begin(), model.slots.end(),
                                           [](const auto& m) { return !m.used && !m.sealed; });
        if (any_blank) {
          ASSERT_NE(taken, kNoSlot);
          ASSERT_TRUE(model.is_blank(index::to_number(taken)));
        } else if (!model.warm.empty()) {
          ASSERT_EQ(taken, SlotId{model.warm.front()});
        } else if (!model.waiting.empty()) {
          ASSERT_EQ(taken, SlotId{model.waiting.front()});
        } else {
          ASSERT_EQ(taken, kNoSlot);
          break;
        }
        model.slots[index::to_number(taken)] = {.used = true};
        model.place(index::to_number(taken));
        std::erase_if(pins, [&](const Pin& pin) {
          if (pin.slot == taken) book.unpin(pin);  // too late, and harmless
          return pin.slot == taken;
        });
        break;
      }
      case 2:
        if (!s.used) break;
        book.give_back(SlotId{slot});
        s.used = false;
        model.place(slot);
        break;
      case 3:
        if (!s.used || s.sealed) break;
        book.seal(SlotId{slot});
        s.sealed = true;
        break;
      case 4:
        if (!s.sealed || !prng.one_in(3)) break;
        book.unseal(SlotId{slot});
        s.sealed = false;
        s.num_soft = s.num_firm = 0;
        model.place(slot);
        std::erase_if(pins, [&](const Pin& pin) { return pin.slot == SlotId{slot}; });
        break;
      case 5: {
        book.touch(SlotId{slot});
        if (std::find(model.warm.begin(), model.warm.end(), slot) != model.warm.end()) model.place(slot);
        break;
      }
      case 6: {
        if (!s.sealed) break;
        const PinKind kind = prng.one_in(2) ? PinKind::kSoft : PinKind::kFirm;
        const bool moves = kind == PinKind::kFirm ? s.num_firm == 0 : s.num_firm == 0 && s.num_soft == 0;
        ++(kind == PinKind::kFirm ? s.num_firm : s.num_soft);
        if (moves) model.place(slot);
        pins.push_back(book.pin(SlotId{slot}, kind));
        break;
      }
      default: {
        if (pins.empty()) break;
        const std::size_t i = prng.below(pins.size());
        Model::Slot& pinned = model.slots[index::to_number(pins[i].slot)];
        int& count = pins[i].kind == PinKind::kFirm ? pinned.num_firm : pinned.num_soft;
        const bool moves = --count == 0 && pinned.num_firm == 0;
        if (moves) model.place(index::to_number(pins[i].slot));
        book.unpin(pins[i]);
        pins.erase(pins.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    ASSERT_TRUE(book.consistent()) << "step " << step;
    ASSERT_EQ(book.num_available(), static_cast<std::size_t>(std::count_if(
                                        model.slots.begin(), model.slots.end(), [](const auto& m) {
                                          return !m.used && (!m.sealed || m.num_firm == 0);
                                        })));
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, SlotBookModel, ::testing::Range<std::uint64_t>(0, 30));

}  // namespace
}  // namespace tpusync::host
