// Soft pins of pages that a lookup has reported, until their get, or until they are too old.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <mutex>

#include "tpusync/base/clock.h"
#include "tpusync/host/region.h"

namespace tpusync::tier {

// Thread-safe. One pin per key: a second lookup renews it.
class PinBoard {
 public:
  PinBoard(host::Region& region, std::chrono::milliseconds lifetime, const base::Clock& clock)
      : region_(region), lifetime_(lifetime), clock_(clock) {}
  PinBoard(const PinBoard&) = delete;
  PinBoard& operator=(const PinBoard&) = delete;
  ~PinBoard();

  void pin(std::span<const index::PageKey> keys);
  void unpin(std::span<const index::PageKey> keys);
  void expire();
  void clear();
  std::size_t size() const;

 private:
  struct Entry {
    host::Pin pin;
    std::chrono::steady_clock::time_point until;
  };
  struct Due {
    index::PageKey key;
    std::chrono::steady_clock::time_point until;
  };
  void expire_locked();

  host::Region& region_;
  const std::chrono::milliseconds lifetime_;
  const base::Clock& clock_;
  mutable std::mutex mutex_;
  std::map<index::PageKey, Entry> entries_;
  std::deque<Due> due_;  // in the order of their times
};

}  // namespace tpusync::tier
