// The work of one part of a batch, on a worker: pages to or from slots, verified, with one outcome each.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "tpusync/base/bytes.h"
#include "tpusync/base/clock.h"
#include "tpusync/exec/ticket.h"
#include "tpusync/flash/breaker.h"
#include "tpusync/flash/counters.h"
#include "tpusync/flash/io_engine.h"
#include "tpusync/flash/page_buffer.h"
#include "tpusync/flash/slot_space.h"
#include "tpusync/flash/write_budget.h"

namespace tpusync::flash {

// What jobs work with; owned by the store, which outlives them.
struct Workshop {
  SlotSpace& space;
  IoEngine& io;
  WriteBudget& budget;
  Breaker& breaker;  // of writing
  Breaker& read_breaker;
  BufferPool& buffers;
  Counters& counters;
  const base::Clock& clock;
  const FsyncPolicy fsync;
  const std::chrono::milliseconds latency_budget;
  std::atomic<bool> closing = false;       // relaxed: late news only costs one more page
  std::atomic<bool> corrupt_said = false;  // relaxed: guards a log line, nothing else
  std::atomic<bool> unsynced = false;      // relaxed: a hint for the interval policy
};

// One batch as the caller gave it, copied, except for the memory behind the addresses.
struct PageRequest {
  std::vector<index::PageKey> keys;
  std::vector<index::PageKey> prefix;
  std::vector<std::uint64_t> addresses;  // [keys][lengths]
  std::vector<std::uint64_t> lengths;
  std::uint64_t page_bytes = 0;  // their sum
  exec::Deadline deadline;
  std::uint64_t clear_count = 0;
  exec::TicketSource source{1};
  std::shared_ptr<std::vector<base::Code>> outcomes;
  std::atomic<int> parts_left = 0;  // acquire-release: the last part sees what the others did

  index::Ancestry ancestry_of(std::size_t i) const;
  std::span<const std::uint64_t> addresses_of(std::size_t i) const {
    return std::span(addresses).subspan(i * lengths.size(), lengths.size());
  }
};

// Why the next pages must not be started, counted for each of them; kOk if they may.
base::Code check_start(const Workshop& shop, const PageRequest& request, std::size_t num_pages);

// Pages of a part, by position, whose slots lie side by side: moved by one transfer.
struct Stretch {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t size() const { return end - begin; }
};
// From this size on a transfer costs what its bytes cost. Larger pages are a stretch each.
inline constexpr std::uint64_t kStretchBytesMax = 256 * base::kKiB;
// `slots` in the order of the pages. Pages that do not fill their slots are a stretch each, too.
std::vector<Stretch> stretches_of(std::span<const index::SlotId> slots, std::uint64_t page_bytes,
                                  std::uint64_t slot_bytes);

// Each sets the outcome of every page it is given. The others answer kBusy for pages that found no place to
// wait.
void run_put(Workshop& shop, PageRequest& request, std::span<const std::size_t> pages);
void refuse_put(Workshop& shop, PageRequest& request, std::span<const std::size_t> pages);

struct PinnedPage {
  std::size_t index;
  PinnedSlot slot;
};
// Both give the pins back.
void run_get(Workshop& shop, PageRequest& request, std::span<const PinnedPage> pages);
void refuse_get(Workshop& shop, PageRequest& request, std::span<const PinnedPage> pages);

}  // namespace tpusync::flash
