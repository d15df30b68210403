// The flash tier: pages of one namespace in a directory of the local SSD, under a capacity, verified on every
// read.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <span>
#include <stop_token>
#include <thread>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/exec/executor.h"
#include "tpusync/exec/ticket.h"
#include "tpusync/flash/counters.h"
#include "tpusync/flash/options.h"
#include "tpusync/flash/page_jobs.h"
#include "tpusync/index/page_key.h"
#include "tpusync/metrics/metrics.h"
#include "tpusync/os/file.h"

namespace tpusync::flash {

// Pages and the memory they are in. Borrowed for the call, except the memory behind `addresses`, which stays
// alive and unmoved until the ticket is done.
struct PageBatch {
  std::span<const index::PageKey> keys;         // in prefix order: page i+1 continues page i
  std::span<const index::PageKey> prefix = {};  // all pages before them, head first; may be empty
  std::span<const std::uint64_t> addresses;     // [keys][lengths] of the pieces that make up a page
  std::span<const std::uint64_t> lengths;       // bytes; they sum up to the page size
  exec::Deadline deadline = std::nullopt;
};

struct BatchTicket {
  exec::Ticket ticket;  // its status is ok: see the outcomes
  std::shared_ptr<const std::vector<base::Code>>
      outcomes;  // one per page, to be read once the ticket is done
};

// A resource. Thread-safe.
class FlashStore {
 public:
  // kInvalid: an option or the path cannot be used. kUnsupported: the directory holds a newer format, or the
  // engine asked for does not work here. kIo: the system refused. `files` outlives the store.
  static base::Result<std::unique_ptr<FlashStore>> open(const FlashOptions& options,
                                                        os::FileSystem& files = os::posix_file_system());
  FlashStore(const FlashStore&) = delete;
  FlashStore& operator=(const FlashStore&) = delete;
  ~FlashStore();

  // Outcome kOk: stored, or stored already; a SIGKILL from now on does not lose it. kExhausted: no space or
  // no budget. kBusy: too much is queued. kIo, kDeadline, kCancelled. The call itself fails for a malformed
  // batch only (kInvalid).
  base::Result<BatchTicket> submit_put(const PageBatch& batch);
  // Outcome kOk: the memory holds what was put. kNotFound, kCorrupt, kIo: a miss, and no entry is left.
  base::Result<BatchTicket> submit_get(const PageBatch& batch);

  // Number of leading keys that are stored; touches them and their ancestors. No IO.
  std::size_t match(std::span<const index::PageKey> keys, std::span<const index::PageKey> prefix);
  std::vector<bool> contains(std::span<const index::PageKey> keys);
  std::size_t remove(std::span<const index::PageKey> keys);
  std::size_t clear();
  std::vector<index::PageKey> keys();  // most recently used first
  std::vector<metrics::Sample> stats();

  // Waits until all that was submitted so far is done and, unless the policy is kNone, on the medium.
  bool flush(exec::Deadline deadline);
  // Cancels what has not started, waits for the rest, gives the region's lock up. Later calls find nothing.
  void close();

  // What the housekeeping thread does once per period; for tests that have none.
  void housekeep();
  bool consistent();  // for tests

 private:
  struct Parts;

  FlashStore(const FlashOptions& options, const base::Clock& clock);
  base::Status check(const PageBatch& batch) const;
  std::shared_ptr<PageRequest> make_request(const PageBatch& batch) const;
  template <typename Page>
  using Work = void (*)(Workshop&, PageRequest&, std::span<const Page>);
  template <typename Page>
  BatchTicket submit(exec::Executor* executor, const std::shared_ptr<PageRequest>& request,
                     const std::vector<Page>& pages, Work<Page> run, Work<Page> refuse);
  void end_part(PageRequest& request, std::uint64_t batch);
  std::size_t pages_per_part(std::size_t num_pages) const;
  void run_housekeeping(const std::stop_token& stop);

  const FlashOptions options_;
  const base::Clock& clock_;
  Counters counters_;

  std::shared_mutex life_mutex_;  // shared: a call is inside; exclusive: close()
  std::unique_ptr<Parts> parts_;  // null once closed

  std::mutex pending_mutex_;
  std::condition_variable pending_changed_;
  std::set<std::uint64_t> pending_;  // numbers of the batches that are not done
  std::uint64_t last_batch_ = 0;

  std::mutex housekeeping_mutex_;
  std::condition_variable_any housekeeping_wake_;
  std::jthread housekeeper_;
};

}  // namespace tpusync::flash
