#include "tpusync/host/key_table.h"

namespace tpusync::host {

void KeyTable::clear() {
  for (std::uint64_t i = 0; i < num_buckets_; ++i) store(buckets_ + i, 0);
}

void KeyTable::insert(std::uint64_t short_hash, index::SlotId slot) {
  std::uint32_t* const bucket = buckets_ + bucket_of(short_hash);
  store(chain_ + index::to_number(slot), load(bucket));
  store(bucket, index::to_number(slot) + 1);
}

void KeyTable::erase(std::uint64_t short_hash, index::SlotId slot) {
  std::uint32_t* link = buckets_ + bucket_of(short_hash);
  // An entry that a damaged table has lost is as good as erased.
  for (std::uint64_t i = 0; i < num_slots_; ++i) {
    const std::uint32_t at = load(link);
    if (at == 0 || at > num_slots_) return;
    if (at == index::to_number(slot) + 1) {
      // The erased entry keeps its own link, so that a reader that stands on it goes on along the chain.
      store(link, load(chain_ + index::to_number(slot)));
      return;
    }
    link = chain_ + (at - 1);
  }
}

}  // namespace tpusync::host
