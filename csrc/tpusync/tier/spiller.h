// Copies sealed pages to flash: those that will be evicted soon first, then the others in the order they
// came.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <stop_token>
#include <thread>
#include <vector>

#include "tpusync/base/clock.h"
#include "tpusync/flash/flash_store.h"
#include "tpusync/host/region.h"
#include "tpusync/metrics/metrics.h"
#include "tpusync/os/aligned_buffer.h"

namespace tpusync::tier {

// Which pages go to flash, and when. A page that is about to be evicted goes in all of them but kNever.
enum class SpillPolicy : unsigned char {
  kNever,
  kThrough,    // every page, soon after it was sealed
  kSelective,  // pages that a lookup has asked for after they were sealed
  kLazy,       // only what is about to be evicted
};

struct SpillOptions {
  SpillPolicy policy = SpillPolicy::kThrough;
  std::size_t num_ahead = 64;       // this many pages before the next eviction are kept on flash, too
  std::size_t queue_limit = 65536;  // pages; more are not queued, and counted
  std::size_t batch_pages = 16;
  std::uint64_t rate_bytes_per_s_max = 0;  // 0: as fast as flash takes them
  // A page that was offered ahead of its eviction and is not on flash is offered again after so long, then
  // after twice as long, and so on. Others are offered once.
  std::chrono::milliseconds offer_again_after{1000};
  std::chrono::milliseconds look_ahead_period{20};
};

// A resource. Thread-safe. One thread, "spill". The page is copied and verified first and written from the
// copy: a slot is never held up by a write.
class Spiller {
 public:
  // What is referred to outlives the spiller.
  Spiller(const SpillOptions& options, host::Region& region, flash::FlashStore& store,
          const base::Clock& clock);
  Spiller(const Spiller&) = delete;
  Spiller& operator=(const Spiller&) = delete;
  ~Spiller();

  void sealed(std::span<const index::PageKey> prefix, std::span<const index::PageKey> keys);
  void asked_for(std::span<const index::PageKey> prefix, std::span<const index::PageKey> keys);

  // Waits until nothing is queued nor under way.
  bool flush(exec::Deadline deadline);
  // Forgets what is queued and waits for the batch that is under way: what was gone from the region before is
  // written no more when this returns.
  void discard();
  // Joins the thread. What is queued stays unwritten.
  void stop();
  std::vector<metrics::Sample> samples() const;

 private:
  struct Item {
    index::PageKey key;
    std::shared_ptr<const std::vector<index::PageKey>> path;  // the prefix of its batch and the batch
    std::size_t depth = 0;                                    // of the page in it
  };
  void enqueue(std::span<const index::PageKey> prefix, std::span<const index::PageKey> keys);
  void run(const std::stop_token& stop);
  std::vector<Item> next_batch();
  bool look_ahead();
  // Answers how long to write nothing afterwards.
  std::chrono::steady_clock::duration write(const std::vector<Item>& items);

  const SpillOptions options_;
  host::Region& region_;
  flash::FlashStore& store_;
  const base::Clock& clock_;
  struct Offer {
    std::chrono::steady_clock::time_point again;  // not before
    std::chrono::milliseconds wait;               // the time between this offer and the next
  };
  // Of the pages that will be evicted next and are not on flash: num_ahead at most. Confined to the thread.
  std::map<index::PageKey, Offer> offers_;
  mutable std::mutex mutex_;
  std::condition_variable_any wake_;
  std::condition_variable idle_;
  std::deque<Item> urgent_;
  std::deque<Item> queue_;
  bool busy_ = false;              // a batch is being written
  std::uint64_t num_batches_ = 0;  // that were
  metrics::Counter spilled_, refused_, not_queued_, gone_, looks_;
  std::vector<os::AlignedBuffer> staging_;
  std::jthread thread_;  // last: it uses the rest
};

}  // namespace tpusync::tier
