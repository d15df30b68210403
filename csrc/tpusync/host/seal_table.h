// The seal records of a region in shared memory: one writer changes them while readers of any process look.
//
//   writer:  retract(slot)  ...bytes of the page change...  publish(slot, seal)
//   reader:  seal = read(slot)  ...copies the page...  holds(slot, seal)?
//
// A reader that is stopped for any time between the two sees afterwards that the generation is another one.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "tpusync/host/region_format.h"

namespace tpusync::host {

// A view of memory that outlives it. read() and holds(): thread-safe, beside one writer. publish() and
// retract(): confined to the writer's lock.
class SealTable {
 public:
  SealTable(std::byte* records, std::uint64_t seed) : records_(records), seed_(seed) {}

  // Nothing: not sealed now, or the record is damaged.
  std::optional<Seal> read(index::SlotId slot) const;
  // Whether the slot still holds what `generation` was given for. Call it after the last byte has been
  // copied.
  bool holds(index::SlotId slot, std::uint64_t generation) const;
  // The generation that the slot has or last had, whole or not.
  std::uint64_t last_generation(index::SlotId slot) const;
  // Whether the record says that the slot is sealed, damaged or not.
  bool marked(index::SlotId slot) const;

  void publish(index::SlotId slot, const Seal& seal);
  // Every later write to the page is seen after this.
  void retract(index::SlotId slot);

  std::uint64_t seed() const { return seed_; }

 private:
  std::uint64_t* words_of(index::SlotId slot) const {
    return reinterpret_cast<std::uint64_t*>(records_ + std::uint64_t{index::to_number(slot)} * kSealBytes);
  }

  std::byte* records_;
  std::uint64_t seed_;
};

}  // namespace tpusync::host
