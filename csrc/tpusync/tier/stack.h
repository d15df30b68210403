// The tiers of one process over its own DRAM region, those of its peers, and flash: one lookup, one get, one
// put.
//
//   match:  own DRAM -> peers' DRAM -> flash, page by page, longest prefix
//   get:    flash reads are started first, DRAM copies run beside them; what arrives is sealed where it lands
//   put:    seals, and leaves the way to flash to the spiller
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
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

  // kInvalid with the first rule that is broken, its value and its range.
  base::Status validate() const;
};

// Pages that stay in DRAM, verified, for as long as this lives: on decode, a length that is reported is a
// promise. The region outlives it; the stack need not.
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

// A resource. Thread-safe. No miss and no fault is an error: a get of what is not here says so per page.
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
    // Of the own region, in use, where `addresses` point: pages are sealed where they land, each only if its
    // slot is still in the same use then. Or none: sealed nowhere.
    std::span<const index::SlotId> slots;
    exec::Deadline deadline;
  };
  // Outcomes as FlashStore::submit_get. The memory behind `addresses` stays until the ticket is done. The
  // call itself fails for a malformed batch only (kInvalid): names a slot that is not in use, for example.
  base::Result<flash::BatchTicket> submit_get(const Get& get);

  // Seals slots of the own region, outcomes as Region::seal; after close() kCancelled. Each page that is not
  // sealed here is counted by reason, in the region's samples.
  std::vector<base::Code> put(std::span<const index::PageKey> prefix, std::span<const index::PageKey> keys,
                              std::span<const index::SlotId> slots);

  // Brings the leading pages into the own region, verifies and pins them firmly. Blocks until `deadline` at
  // most; the answer holds the pages that are certain, maybe none.
  std::unique_ptr<Promised> promise(std::span<const index::PageKey> keys,
                                    std::span<const index::PageKey> prefix, exec::Deadline deadline);

  // Waits until what was put is on flash as far as the policy wants it there.
  bool flush(exec::Deadline deadline);

  struct Dropped {
    std::size_t num_dram = 0;
    std::size_t num_flash = 0;
  };
  // Drops pages from the own region and from flash; peers keep theirs. A get or put of the same page that
  // runs meanwhile may bring it back.
  Dropped remove(std::span<const index::PageKey> keys);
  // Drops all of them. A get that was submitted before still delivers, and seals nothing any more: nothing
  // from before is in DRAM or on flash when this returns.
  Dropped clear();

  // Waits for the calls that are inside and for what they have submitted, joins all threads and gives the
  // pins of lookups up. Later calls find nothing and seal nothing; nothing here touches memory any more.
  void close();

  std::vector<metrics::Sample> samples() const;

 private:
  struct Request;
  // A call that is inside: close() waits for it. False once the stack is closed.
  class Inside;
  Stack(const StackOptions& options, host::Region& region, flash::FlashStore* store, Peers::Options peers);

  Match find(std::span<const index::PageKey> keys, std::span<const index::PageKey> prefix);
  base::Result<flash::BatchTicket> start_get(const Get& get);
  base::Status check(const Get& get) const;
  template <typename Seal>
  void seal_landed(const Request& request, std::size_t i, const Seal& seal);
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
  mutable std::shared_mutex life_mutex_;  // shared: a call is inside; exclusive: close()
  bool closed_ = false;
  std::mutex close_mutex_;         // over the joining of threads
  std::shared_mutex clear_mutex_;  // shared: a page is being sealed; exclusive: clear(). After life_mutex_
  std::uint64_t epoch_ = 0;        // counts clear(): a get seals only in the epoch it was submitted in
  std::unique_ptr<Spiller> spiller_;
  // Last: their jobs use the rest. `copies_` may hand work to `reads_`, which only waits for flash.
  std::unique_ptr<exec::Executor> reads_;
  std::unique_ptr<exec::Executor> copies_;
};

}  // namespace tpusync::tier
