#include "tpusync/flash/flash_store.h"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <numeric>

#include "tpusync/base/log.h"

namespace tpusync::flash {

using base::Code;
using base::Result;
using base::Status;
using index::PageKey;

namespace {

const base::Clock kRealClock;
constexpr std::size_t kQueueLimit = 4096;
constexpr std::uint64_t kExtentsPerCapacity = 8;
// Below this, handing work to another thread costs more than it saves.
constexpr std::uint64_t kPartBytesMin = 256 * base::kKiB;

}  // namespace

// In order of construction; the executors go first, and with them the last job.
struct FlashStore::Parts {
  std::unique_ptr<Node> node;
  WriteBudget budget;
  Breaker breaker;
  Breaker read_breaker;
  SlotSpace space;
  std::unique_ptr<IoEngine> io;
  BufferPool buffers;
  Workshop shop;
  // Threads of their own for each: a request that waits for its prefix never waits behind a burst of backups.
  std::unique_ptr<exec::Executor> writers;
  std::unique_ptr<exec::Executor> readers;

  Parts(const FlashOptions& options, const base::Clock& clock, Counters& counters,
        std::unique_ptr<Node> the_node, std::unique_ptr<Region> region, std::unique_ptr<IoEngine> engine)
      : node(std::move(the_node)),
        budget(*node, clock),
        breaker(clock, "writing"),
        read_breaker(clock, "reading"),
        space(*node, std::move(region), clock, counters, extent_slots(options, *node), options.ttl),
        io(std::move(engine)),
        buffers(base::round_up(options.page_bytes, kSlotAlignBytes)),
        shop{space,   *io,      budget, breaker,       read_breaker,
             buffers, counters, clock,  options.fsync, options.latency_budget} {}

  static std::uint32_t extent_slots(const FlashOptions& options, const Node& node) {
    const std::uint64_t slot_bytes = base::round_up(options.page_bytes, kSlotAlignBytes);
    const std::uint64_t extent_bytes =
        std::min(options.extent_bytes, node.capacity_bytes() / kExtentsPerCapacity);
    return static_cast<std::uint32_t>(std::max<std::uint64_t>(1, extent_bytes / slot_bytes));
  }
};

FlashStore::FlashStore(const FlashOptions& options, const base::Clock& clock)
    : options_(options), clock_(clock) {}

FlashStore::~FlashStore() {
  close();
}

Result<std::unique_ptr<FlashStore>> FlashStore::open(const FlashOptions& options, os::FileSystem& files) {
  TPUSYNC_TRY(options.validate());
  const base::Clock& clock = options.clock != nullptr ? *options.clock : kRealClock;
  std::unique_ptr<FlashStore> store(new FlashStore(options, clock));
  auto node = Node::open(files, clock, options, store->counters_);
  if (!node) return tl::unexpected(std::move(node).error());
  auto region = (*node)->adopt_region(options, options.io != IoKind::kBuffered);
  if (!region) return tl::unexpected(std::move(region).error());
  if (options.io != IoKind::kBuffered && !(*region)->slots().direct()) {
    base::log(
        base::LogLevel::kInfo,
        fmt::format("{}: the file system refuses O_DIRECT; going through the page cache", options.path));
  }
  auto engine = make_engine(options.io, (*region)->slots(), options.memory);
  if (!engine) return tl::unexpected(std::move(engine).error());
  store->parts_ = std::make_unique<Parts>(options, clock, store->counters_, std::move(*node),
                                          std::move(*region), std::move(*engine));
  TPUSYNC_TRY(store->parts_->space.recover());
  const int num_threads = options.num_threads > 0 ? options.num_threads : store->parts_->io->num_threads();
  for (auto [name, executor] :
       {std::pair{"flash-put", &store->parts_->writers}, std::pair{"flash-get", &store->parts_->readers}}) {
    auto opened =
        exec::Executor::open({.name = name, .num_threads = num_threads, .queue_limit = kQueueLimit});
    if (!opened) return tl::unexpected(std::move(opened).error());
    *executor = std::move(*opened);
  }
  store->housekeep();
  if (options.housekeeping_period.count() > 0) {
    store->housekeeper_ =
        std::jthread([raw = store.get()](const std::stop_token& stop) { raw->run_housekeeping(stop); });
  }
  return store;
}

// ---------------------------------------------------------------- batches

Status FlashStore::check(const PageBatch& batch) const {
  if (batch.addresses.size() != batch.keys.size() * batch.lengths.size()) {
    return base::fail(Code::kInvalid,
                      fmt::format("{} addresses for {} pages of {} pieces", batch.addresses.size(),
                                  batch.keys.size(), batch.lengths.size()));
  }
  std::uint64_t left_bytes = options_.page_bytes;
  for (const std::uint64_t length : batch.lengths) {
    if (length > left_bytes) break;
    left_bytes -= length;
  }
  const std::uint64_t num_bytes =
      std::accumulate(batch.lengths.begin(), batch.lengths.end(), std::uint64_t{0});
  if (left_bytes != 0 || num_bytes != options_.page_bytes) {
    return base::fail(Code::kInvalid, fmt::format("pieces of {} bytes, a page of this store has {}",
                                                  num_bytes, options_.page_bytes));
  }
  if (std::find(batch.addresses.begin(), batch.addresses.end(), 0) != batch.addresses.end()) {
    return base::fail(Code::kInvalid, "an address is null");
  }
  return {};
}

std::shared_ptr<PageRequest> FlashStore::make_request(const PageBatch& batch) const {
  auto request = std::make_shared<PageRequest>();
  request->keys.assign(batch.keys.begin(), batch.keys.end());
  request->prefix.assign(batch.prefix.begin(), batch.prefix.end());
  request->addresses.assign(batch.addresses.begin(), batch.addresses.end());
  request->lengths.assign(batch.lengths.begin(), batch.lengths.end());
  request->page_bytes = options_.page_bytes;
  request->deadline = batch.deadline;
  request->outcomes = std::make_shared<std::vector<Code>>(batch.keys.size(), Code::kCancelled);
  return request;
}

std::size_t FlashStore::pages_per_part(std::size_t num_pages) const {
  const auto num_threads = static_cast<std::size_t>(parts_->readers->num_threads());
  const std::size_t num_even = (num_pages + num_threads - 1) / num_threads;
  return std::max<std::size_t>({1, num_even, kPartBytesMin / options_.page_bytes});
}

void FlashStore::end_part(PageRequest& request, std::uint64_t batch) {
  if (request.parts_left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  // Pages that were written in parallel became visible in any order: put ancestors first again.
  parts_->space.touch(request.keys, request.prefix);
  request.source.finish_part({});
  // Notified under the lock: whoever waits may destroy the store as soon as it is let go.
  std::lock_guard lock(pending_mutex_);
  pending_.erase(batch);
  pending_changed_.notify_all();
}

template <typename Page>
BatchTicket FlashStore::submit(exec::Executor* executor, const std::shared_ptr<PageRequest>& request,
                               const std::vector<Page>& pages, Work<Page> run, Work<Page> refuse) {
  BatchTicket answer{request->source.ticket(), request->outcomes};
  if (pages.empty()) {
    request->source.finish_part({});
    return answer;
  }
  const std::size_t per_part = pages_per_part(pages.size());
  request->parts_left = static_cast<int>((pages.size() + per_part - 1) / per_part);
  std::uint64_t batch = 0;
  {
    std::lock_guard lock(pending_mutex_);
    pending_.insert(batch = ++last_batch_);
  }
  Workshop& shop = parts_->shop;
  for (std::size_t begin = 0; begin < pages.size(); begin += per_part) {
    const std::size_t end = std::min(pages.size(), begin + per_part);
    const std::vector<Page> part(pages.begin() + begin, pages.begin() + end);
    const Status queued = executor->submit([this, request, run, batch, part, &shop] {
      request->source.start();
      run(shop, *request, part);
      end_part(*request, batch);
    });
    if (queued) continue;
    refuse(shop, *request, part);
    end_part(*request, batch);
  }
  return answer;
}

Result<BatchTicket> FlashStore::submit_put(const PageBatch& batch) {
  TPUSYNC_TRY(check(batch));
  const auto request = make_request(batch);
  std::shared_lock life(life_mutex_);
  std::vector<std::size_t> pages;
  if (parts_) {
    counters_.puts.add(batch.keys.size());
    request->clear_count = parts_->space.clear_count();
    const std::vector<bool> present = parts_->space.contains(batch.keys);
    for (std::size_t i = 0; i < present.size(); ++i) {
      (*request->outcomes)[i] = Code::kOk;
      if (!present[i]) pages.push_back(i);
    }
    counters_.puts_present.add(present.size() - pages.size());
    parts_->space.touch(batch.keys, batch.prefix);
  }
  return submit<std::size_t>(parts_ ? parts_->writers.get() : nullptr, request, pages, run_put, refuse_put);
}

Result<BatchTicket> FlashStore::submit_get(const PageBatch& batch) {
  TPUSYNC_TRY(check(batch));
  const auto request = make_request(batch);
  std::shared_lock life(life_mutex_);
  std::vector<PinnedPage> pages;
  if (parts_) {
    counters_.gets.add(batch.keys.size());
    const std::vector<PinnedSlot> pinned = parts_->space.pin(batch.keys, batch.prefix);
    for (std::size_t i = 0; i < pinned.size(); ++i) {
      (*request->outcomes)[i] = Code::kNotFound;
      if (pinned[i].slot != index::kNoSlot) pages.push_back({i, pinned[i]});
    }
    counters_.misses.add(pinned.size() - pages.size());
  }
  return submit<PinnedPage>(parts_ ? parts_->readers.get() : nullptr, request, pages, run_get, refuse_get);
}

// ---------------------------------------------------------------- index

std::size_t FlashStore::match(std::span<const PageKey> keys, std::span<const PageKey> prefix) {
  std::shared_lock life(life_mutex_);
  counters_.match_keys.add(keys.size());
  if (parts_ && !parts_->read_breaker.allow()) {
    counters_.match_declined.add(keys.size());
    return 0;
  }
  const std::size_t num_found = parts_ ? parts_->space.match(keys, prefix) : 0;
  counters_.match_hits.add(num_found);
  return num_found;
}

std::vector<bool> FlashStore::contains(std::span<const PageKey> keys) {
  std::shared_lock life(life_mutex_);
  return parts_ ? parts_->space.contains(keys) : std::vector<bool>(keys.size());
}

std::size_t FlashStore::remove(std::span<const PageKey> keys) {
  std::shared_lock life(life_mutex_);
  return parts_ ? parts_->space.remove(keys) : 0;
}

std::size_t FlashStore::clear() {
  std::shared_lock life(life_mutex_);
  return parts_ ? parts_->space.clear() : 0;
}

std::vector<PageKey> FlashStore::keys() {
  std::shared_lock life(life_mutex_);
  return parts_ ? parts_->space.keys() : std::vector<PageKey>();
}

std::vector<metrics::Sample> FlashStore::stats() {
  std::vector<metrics::Sample> samples;
  counters_.append_to(samples);
  samples.push_back({"page_bytes", options_.page_bytes});
  std::shared_lock life(life_mutex_);
  samples.push_back({"open", std::uint64_t{parts_ != nullptr}});
  if (!parts_) return samples;
  const SlotSpace::Gauges gauges = parts_->space.gauges();
  const Region& region = parts_->space.region();
  samples.push_back({"entries", gauges.entries});
  samples.push_back({"slots", gauges.slots});
  samples.push_back({"slot_bytes", region.slot_bytes()});
  samples.push_back({"bytes_on_disk", parts_->node->used_bytes().value_or(0)});
  samples.push_back({"capacity_bytes", parts_->node->capacity_bytes()});
  samples.push_back({"floor_bytes", parts_->node->floor_bytes()});
  samples.push_back({"write_budget_bytes_per_day", parts_->node->budget_bytes_per_day()});
  samples.push_back({"budget_left_bytes", parts_->budget.left_bytes()});
  samples.push_back({"recovered_entries", gauges.recovered_entries});
  samples.push_back({"recovery_ms", gauges.recovery_ms});
  samples.push_back(
      {"jobs_queued", std::uint64_t{parts_->writers->num_queued() + parts_->readers->num_queued()}});
  samples.push_back({"breaker_open", std::uint64_t{parts_->breaker.open()}});
  samples.push_back({"read_breaker_open", std::uint64_t{parts_->read_breaker.open()}});
  samples.push_back({"direct_io", std::uint64_t{region.slots().direct()}});
  samples.push_back({"io_engine", std::string(parts_->io->name())});
  samples.push_back({"registered_bytes", parts_->io->num_registered_bytes()});
  samples.push_back({"region", region.name()});
  return samples;
}

// ---------------------------------------------------------------- life

bool FlashStore::flush(exec::Deadline deadline) {
  {
    std::unique_lock lock(pending_mutex_);
    const std::uint64_t last = last_batch_;
    const auto is_done = [&] { return pending_.empty() || *pending_.begin() > last; };
    if (!deadline) {
      pending_changed_.wait(lock, is_done);
    } else if (!pending_changed_.wait_until(lock, *deadline, is_done)) {
      return false;
    }
  }
  std::shared_lock life(life_mutex_);
  if (!parts_ || options_.fsync == FsyncPolicy::kNone) return true;
  return parts_->space.region().sync_slots() && parts_->space.region().sync_table();
}

void FlashStore::close() {
  if (housekeeper_.joinable()) {
    housekeeper_.request_stop();
    housekeeping_wake_.notify_all();
    housekeeper_.join();
  }
  std::unique_ptr<Parts> parts;
  {
    std::unique_lock life(life_mutex_);
    if (!parts_) return;
    parts_->shop.closing.store(true, std::memory_order_relaxed);
    // The jobs still use parts_: it goes once they are over.
    parts_->readers.reset();
    parts_->writers.reset();
    parts = std::move(parts_);
  }
}

void FlashStore::housekeep() {
  std::shared_lock life(life_mutex_);
  if (!parts_) return;
  parts_->space.housekeep();
  const bool unsynced = parts_->shop.unsynced.exchange(false, std::memory_order_relaxed);
  if (options_.fsync != FsyncPolicy::kInterval || !unsynced) return;
  Region& region = parts_->space.region();
  if (!region.sync_slots() || !region.sync_table()) {
    counters_.io_errors.add();
    parts_->shop.unsynced.store(true, std::memory_order_relaxed);
  }
}

void FlashStore::run_housekeeping(const std::stop_token& stop) {
  pthread_setname_np(pthread_self(), "flash-keeper");
  std::unique_lock lock(housekeeping_mutex_);
  while (!stop.stop_requested()) {
    housekeeping_wake_.wait_for(lock, stop, options_.housekeeping_period, [] { return false; });
    if (!stop.stop_requested()) housekeep();
  }
}

bool FlashStore::consistent() {
  std::shared_lock life(life_mutex_);
  return !parts_ || parts_->space.consistent();
}

}  // namespace tpusync::flash
