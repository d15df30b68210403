#include <algorithm>

#include "tpusync/base/prng.h"
#include "tpusync/index/page_list.h"
#include "tpusync/index/prefix_index.h"
#include "tpusync/index/replay.h"

namespace tpusync::index {

namespace {

PageKey key_of(PageNumber page) {
  PageKey key;
  base::Prng(page).fill(key.bytes);
  return key;
}

// What the flash engine does around its index, without the flash.
class EngineCache final : public ReplayCache {
 public:
  EngineCache(std::unique_ptr<EvictOrder> order, const Requests& requests, std::size_t num_slots)
      : index_(std::move(order)), keys_(requests.num_pages()) {
    for (PageNumber page = 0; page < keys_.size(); ++page) keys_[page] = key_of(page);
    index_.grow_to(num_slots);
    for (std::size_t slot = num_slots; slot-- > 0;) free_.push_back(SlotId{static_cast<std::uint32_t>(slot)});
  }

  bool contains(PageNumber page) const override { return index_.find(keys_[page]) != kNoSlot; }

  void use(std::span<const PageNumber> path, std::size_t num_hidden) override {
    std::vector<PageKey> keys;
    for (PageNumber page : path) keys.push_back(keys_[page]);
    const auto prefix = std::span(keys).first(num_hidden);
    index_.touch_path(prefix, std::span(keys).subspan(num_hidden));
    std::vector<std::size_t> missing;
    for (std::size_t i = num_hidden; i < keys.size(); ++i) {
      if (index_.find(keys[i]) == kNoSlot) missing.push_back(i);
    }
    // All slots of a batch are taken before the first page of it is stored, as in the engine.
    const std::vector<SlotId> slots = take_slots(keys, missing);
    for (std::size_t n = 0; n < slots.size(); ++n) {
      const std::size_t i = missing[n];
      const Ancestry ancestry = {.parent = i == 0 ? 0 : keys[i - 1].short_hash(),
                                 .depth = static_cast<std::uint16_t>(std::min<std::size_t>(i, 65535))};
      index_.insert(slots[n], keys[i], ancestry);
    }
    num_written_ += slots.size();
  }

 private:
  // One per page, fewer from the first that is not worth a place on: without it the others cannot be found.
  std::vector<SlotId> take_slots(std::span<const PageKey> keys, std::span<const std::size_t> missing) {
    std::vector<SlotId> slots;
    bool admitted = true;
    for (std::size_t i : missing) {
      if (admitted && free_.empty()) {
        const SlotId victim = index_.victim([](SlotId) { return true; });
        admitted = index_.admit(keys[i], victim);
        if (admitted) index_.erase(victim);
        if (admitted) free_.push_back(victim);
      } else if (!admitted) {
        index_.admit(keys[i], kNoSlot);
      }
      if (!admitted) continue;
      slots.push_back(free_.back());
      free_.pop_back();
    }
    return slots;
  }

  PrefixIndex index_;
  std::vector<PageKey> keys_;
  std::vector<SlotId> free_;
};

// Least recently used; of one path the head is the youngest.
class LruCache final : public ReplayCache {
 public:
  LruCache(const Requests& requests, std::size_t num_slots)
      : num_slots_(num_slots), list_(requests.num_pages()) {}

  bool contains(PageNumber page) const override { return list_.contains(page); }

  void use(std::span<const PageNumber> path, std::size_t num_hidden) override {
    for (std::size_t i = path.size(); i-- > num_hidden;) {
      if (list_.contains(path[i])) {
        list_.erase(path[i]);
      } else {
        ++num_written_;
      }
      list_.push_front(path[i]);
      if (list_.size() > num_slots_) list_.erase(list_.back());
    }
  }

 private:
  const std::size_t num_slots_;
  PageList list_;
};

// S3-FIFO (Yang et al., SOSP 2023): a tenth is for new pages; those used again there move to the main queue,
// the others leave a ghost that lets them start in the main queue next time.
class S3FifoCache final : public ReplayCache {
 public:
  S3FifoCache(const Requests& requests, std::size_t num_slots)
      : num_slots_(num_slots),
        num_small_(std::max<std::size_t>(1, num_slots / 10)),
        small_(requests.num_pages()),
        main_(requests.num_pages()),
        ghosts_(requests.num_pages()),
        uses_(requests.num_pages()) {}

  bool contains(PageNumber page) const override { return small_.contains(page) || main_.contains(page); }

  void use(std::span<const PageNumber> path, std::size_t num_hidden) override {
    for (std::size_t i = path.size(); i-- > num_hidden;) use_page(path[i]);
  }

 private:
  void use_page(PageNumber page) {
    if (contains(page)) {
      uses_[page] = static_cast<std::uint8_t>(std::min(uses_[page] + 1, 3));
      return;
    }
    while (small_.size() + main_.size() >= num_slots_) evict();
    uses_[page] = 0;
    ++num_written_;
    if (ghosts_.contains(page)) {
      ghosts_.erase(page);
      main_.push_front(page);
    } else {
      small_.push_front(page);
    }
  }

  void evict() {
    if (small_.size() >= num_small_ || main_.size() == 0) {
      evict_from_small();
    } else {
      evict_from_main();
    }
  }

  void evict_from_small() {
    while (small_.size() > 0) {
      const PageNumber page = small_.back();
      small_.erase(page);
      if (uses_[page] == 0) {
        if (ghosts_.contains(page)) ghosts_.erase(page);
        ghosts_.push_front(page);
        if (ghosts_.size() > num_slots_) ghosts_.erase(ghosts_.back());
        return;
      }
      uses_[page] = 0;
      main_.push_front(page);
      if (main_.size() > num_slots_ - num_small_) evict_from_main();
    }
  }

  void evict_from_main() {
    while (main_.size() > 0) {
      const PageNumber page = main_.back();
      main_.erase(page);
      if (uses_[page] == 0) return;
      --uses_[page];
      main_.push_front(page);
    }
  }

  const std::size_t num_slots_;
  const std::size_t num_small_;
  PageList small_;
  PageList main_;
  PageList ghosts_;
  std::vector<std::uint8_t> uses_;
};

}  // namespace

std::unique_ptr<ReplayCache> make_replay_cache(ReplayPolicy policy, const Requests& requests,
                                               std::size_t num_slots) {
  switch (policy) {
    case ReplayPolicy::kReuse:
      return std::make_unique<EngineCache>(make_reuse_order(), requests, num_slots);
    case ReplayPolicy::kLeafLru:
      return std::make_unique<EngineCache>(make_lru_order(), requests, num_slots);
    case ReplayPolicy::kLru:
      return std::make_unique<LruCache>(requests, num_slots);
    case ReplayPolicy::kS3Fifo:
      return std::make_unique<S3FifoCache>(requests, num_slots);
  }
  return nullptr;
}

}  // namespace tpusync::index
