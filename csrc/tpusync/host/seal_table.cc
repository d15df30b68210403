#include "tpusync/host/seal_table.h"

#include <atomic>

namespace tpusync::host {

namespace {

// Words in shared memory are only ever accessed as atomics of the size that every CPU here reads in one
// piece; a load needs no write access.
std::uint64_t load(const std::uint64_t* word, std::memory_order order) {
  return std::atomic_ref(*const_cast<std::uint64_t*>(word)).load(order);
}
void store(std::uint64_t* word, std::uint64_t value, std::memory_order order) {
  std::atomic_ref(*word).store(value, order);
}
static_assert(std::atomic_ref<std::uint64_t>::is_always_lock_free);

}  // namespace

std::optional<Seal> SealTable::read(index::SlotId slot) const {
  const std::uint64_t* const from = words_of(slot);
  SealWords words;
  // acquire: the record's words and the page's bytes are read after it, hence as new as this generation.
  words[0] = load(from, std::memory_order_acquire);
  if ((words[0] & 1) == 0) return std::nullopt;
  for (std::size_t i = 1; i < words.size(); ++i) words[i] = load(from + i, std::memory_order_relaxed);
  if (!holds(slot, words[0] >> 1)) return std::nullopt;
  return decode_seal(words, seed_, slot);
}

bool SealTable::holds(index::SlotId slot, std::uint64_t generation) const {
  // acquire fence: whatever was read before is older than the word that is read next. It pairs with the fence
  // in retract(): a reader that saw one changed byte of the page sees the retracted word, too.
  std::atomic_thread_fence(std::memory_order_acquire);
  return load(words_of(slot), std::memory_order_relaxed) == (generation << 1 | 1);
}

std::uint64_t SealTable::last_generation(index::SlotId slot) const {
  return load(words_of(slot), std::memory_order_relaxed) >> 1;
}

bool SealTable::marked(index::SlotId slot) const {
  return (load(words_of(slot), std::memory_order_relaxed) & 1) != 0;
}

void SealTable::publish(index::SlotId slot, const Seal& seal) {
  std::uint64_t* const to = words_of(slot);
  const SealWords words = encode_seal(seal, seed_, slot);
  for (std::size_t i = 1; i < words.size(); ++i) store(to + i, words[i], std::memory_order_relaxed);
  // release: who sees the generation sees the record and the page.
  store(to, words[0], std::memory_order_release);
}

void SealTable::retract(index::SlotId slot) {
  std::uint64_t* const word = words_of(slot);
  store(word, load(word, std::memory_order_relaxed) & ~std::uint64_t{1}, std::memory_order_relaxed);
  // release fence: see holds().
  std::atomic_thread_fence(std::memory_order_release);
}

}  // namespace tpusync::host
