#include "tpusync/tier/pin_board.h"

namespace tpusync::tier {

PinBoard::~PinBoard() {
  clear();
}

void PinBoard::clear() {
  std::lock_guard lock(mutex_);
  for (const auto& [key, entry] : entries_) region_.unpin(entry.pin);
  entries_.clear();
  due_.clear();
}

void PinBoard::pin(std::span<const index::PageKey> keys) {
  std::lock_guard lock(mutex_);
  expire_locked();
  const auto until = clock_.now() + lifetime_;
  for (const index::PageKey& key : keys) {
    const std::optional<host::Pin> pin = region_.pin(key, host::PinKind::kSoft);
    const auto known = entries_.find(key);
    if (known != entries_.end()) {
      region_.unpin(known->second.pin);
      entries_.erase(known);
    }
    if (!pin) continue;
    entries_[key] = {*pin, until};
    due_.push_back({key, until});
  }
}

void PinBoard::unpin(std::span<const index::PageKey> keys) {
  std::lock_guard lock(mutex_);
  for (const index::PageKey& key : keys) {
    const auto known = entries_.find(key);
    if (known == entries_.end()) continue;
    region_.unpin(known->second.pin);
    entries_.erase(known);
  }
}

void PinBoard::expire() {
  std::lock_guard lock(mutex_);
  expire_locked();
}

void PinBoard::expire_locked() {
  const auto now = clock_.now();
  while (!due_.empty() && due_.front().until <= now) {
    const auto known = entries_.find(due_.front().key);
    // A renewed pin has a later time of its own.
    if (known != entries_.end() && known->second.until <= now) {
      region_.unpin(known->second.pin);
      entries_.erase(known);
    }
    due_.pop_front();
  }
}

std::size_t PinBoard::size() const {
  std::lock_guard lock(mutex_);
  return entries_.size();
}

}  // namespace tpusync::tier
