// The tiers of one process over its own DRAM region, those of its peers, and flash: one lookup, one get, one
// put.
//
//   match:  own DRAM -> peers' DRAM -> flash, page by page, longest prefix
//   get:    flash reads are started first, DRAM copies run beside them; what arrives is sealed where it lands
//   put:    seals, and leaves the way to flash to the spiller
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "tpusync/base/clock.h"
#include "tpusync/base/error.h"
#include "tpusync/exec/executor.h"
#include "tpusync/exec/ticket.h"
#include "tpusync/flash/flash_store.h"
#include "tpusync/host/region.h"
#include "tpusync/tier/peers.h"
#include "tpusync/tier/pin_board.h"
#include "tpusync/tier/promises.h"
#include "tpusync/tier/spiller.h"

namespace tpusync::tier {

struct StackOptions {
  int num_copy_threads = 2;
  std::chrono::milliseconds pin_lifetime{30000};  // of a page that a lookup reported and nobody fetched
  std::chrono::milliseconds peer_refresh_period{200};
  PromiseOptions promises{};
  SpillOptions spill{};
  const base::Clock* clock = nullptr;  // outlives the stack; null: the real one
};

// Pages that stay in DRAM, verified, for as long as this lives: on decode, a length that is reported is a
// promise.
class Promised {
 public:
  Promised(host::Region& region, std::vector<host::Pin> pins) : region_(region), pins_(std::move(pins)) {}
  Promised(const Promised&) = delete;
  Promised& operator=(const Promised&) = delete;
  ~Promised();
  std::size_t num_pages() const { return pins_.size(); }
  void release();  // before its end

 private:
  host::Region& region_;
  std::vector<host::Pin> pins_;
};

// A resource. Thread-safe.
class Stack {
 public:
  // `region` and `store`, which may be null, outlive the stack.
  static base::Result<std::unique_ptr<Stack>> open(const StackOptions& options, host::Region& region,
                                                   flash::FlashStore* store);
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  ~Stack();

  struct Match {
    std::size_t num_pages = 0;  // leading pages; by where the nearest copy of each is:
    std::size_t num_own = 0;
    std::size_t num_peer = 0;
    std::size_t num_flash = 0;
  };
  // Touches what it finds and its ancestors, and pins, softly, the own pages of the answer.
  Match match(std::span<const index::PageKey> keys, std::span<const index::PageKey> prefix);

  struct Get {
    std::span<const index::PageKey> keys;
    std::span<const index::PageKey> prefix;
    std::span<const std::uint64_t> addresses;  // [keys][pieces of the region's geometry]
    std::span<const index::SlotId>
        slots;  // of the own region, where `addresses` point; or none: sealed nowhere
    exec::Deadline deadline;
  };
  // Outcomes as FlashStore::submit_get. The memory behind `addresses` stays until the ticket is done.
  base::Result<flash::BatchTicket> submit_get(const Get& get);

  // Seals slots of the own region, as Region::seal.
  std::vector<base::Code> put(std::span<const index::PageKey> prefix, std::span<const index::PageKey> keys,
                              std::span<const index::SlotId> slots);

  // Brings the leading pages into the own region, verifies and pins them firmly. Blocks until `deadline` at
  // most; the answer holds the pages that are certain, maybe none.
  std::unique_ptr<Promised> promise(std::span<const index::PageKey> keys,
                                    std::span<const index::PageKey> prefix, exec::Deadline deadline);

  // Waits until what was put is on flash as far as the policy wants it there.
  bool flush(exec::Deadline deadline);
  std::vector<metrics::Sample> samples() const;

 private:
  struct Request;
  Stack(const StackOptions& options, host::Region& region, flash::FlashStore* store, Peers::Options peers);

  void copy_pages(const std::shared_ptr<Request>& request, std::vector<std::size_t> pages);
  base::Code copy_page(Request& request, std::size_t i);
  void read_pages(const std::shared_ptr<Request>& request, std::vector<std::size_t> pages);
  void finish_read(const std::shared_ptr<Request>& request, const std::vector<std::size_t>& pages,
                   const flash::BatchTicket& batch, std::chrono::steady_clock::time_point started);
  void fetch(std::span<const index::PageKey> keys, std::span<const index::PageKey> prefix,
             exec::Deadline deadline, const std::function<void()>& before_free);
  void end_part(const std::shared_ptr<Request>& request);

  const StackOptions options_;
  const base::Clock& clock_;
  host::Region& region_;
  flash::FlashStore* const store_;
  Peers peers_;
  Promises promises_;
  PinBoard pins_;
  mutable struct {
    metrics::Counter matches, keys_asked, hits_own, hits_peer, hits_flash, declined, got_own, got_peer,
        got_flash, missed, corrupt;
  } counters_;
  std::unique_ptr<Spiller> spiller_;
  // Last: their jobs use the rest. `copies_` may hand work to `reads_`, which only waits for flash.
  std::unique_ptr<exec::Executor> reads_;
  std::unique_ptr<exec::Executor> copies_;
};

}  // namespace tpusync::tier
