// This process's part of the day's write budget: taken out of the node's ledger in chunks.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>

#include "tpusync/base/clock.h"
#include "tpusync/flash/node.h"

namespace tpusync::flash {

// Thread-safe. What is left of a chunk goes back at the end; a SIGKILL loses at most one chunk of budget.
class WriteBudget {
 public:
  WriteBudget(Node& node, const base::Clock& clock);
  WriteBudget(const WriteBudget&) = delete;
  WriteBudget& operator=(const WriteBudget&) = delete;
  ~WriteBudget();

  // Admission: false when the day's budget is spent.
  bool take(std::uint64_t bytes);
  // For bytes that were taken and not written.
  void put_back(std::uint64_t bytes);
  std::uint64_t left_bytes();

 private:
  Node& node_;
  const base::Clock& clock_;
  std::mutex mutex_;
  std::uint64_t leased_bytes_ = 0;
  std::chrono::steady_clock::time_point next_try_{};
};

}  // namespace tpusync::flash
