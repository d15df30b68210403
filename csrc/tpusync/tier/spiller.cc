#include "tpusync/tier/spiller.h"

#include <pthread.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace tpusync::tier {

using base::Code;
using index::PageKey;

Spiller::Spiller(const SpillOptions& options, host::Region& region, flash::FlashStore& store,
                 const base::Clock& clock)
    : options_(options), region_(region), store_(store), clock_(clock) {
  for (std::size_t i = 0; i < options_.batch_pages; ++i)
    staging_.emplace_back(region.geometry().page_bytes());
  thread_ = std::jthread([this](std::stop_token stop) {
    ::pthread_setname_np(::pthread_self(), "spill");
    run(stop);
  });
}

Spiller::~Spiller() = default;

void Spiller::sealed(std::span<const PageKey> prefix, std::span<const PageKey> keys) {
  if (options_.policy == SpillPolicy::kThrough) enqueue(prefix, keys);
}

void Spiller::asked_for(std::span<const PageKey> prefix, std::span<const PageKey> keys) {
  if (options_.policy == SpillPolicy::kSelective) enqueue(prefix, keys);
}

void Spiller::enqueue(std::span<const PageKey> prefix, std::span<const PageKey> keys) {
  auto path = std::make_shared<std::vector<PageKey>>(prefix.begin(), prefix.end());
  path->insert(path->end(), keys.begin(), keys.end());
  const std::vector<bool> there = store_.contains(keys);
  std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (there[i] || !region_.contains(keys[i])) continue;  // not sealed: nothing to write
    if (queue_.size() >= options_.queue_limit) {
      not_queued_.add();
      continue;
    }
    queue_.push_back({keys[i], path, prefix.size() + i});
  }
  wake_.notify_all();
}

void Spiller::run(const std::stop_token& stop) {
  std::chrono::steady_clock::duration pause{0};
  while (!stop.stop_requested()) {
    if (pause.count() == 0) {
      const std::vector<Item> items = next_batch();
      if (!items.empty()) {
        pause = std::max(write(items), std::chrono::steady_clock::duration{0});
        std::lock_guard lock(mutex_);
        busy_ = false;
        ++num_batches_;
        idle_.notify_all();
        continue;
      }
      if (look_ahead()) continue;
    }
    std::unique_lock lock(mutex_);
    if (pause.count() > 0) {
      wake_.wait_for(lock, stop, std::exchange(pause, {}), [] { return false; });
    } else {
      wake_.wait_for(lock, stop, options_.look_ahead_period,
                     [this] { return !queue_.empty() || !urgent_.empty(); });
    }
  }
}

// Looks for pages that will be evicted soon and are not on flash yet.
bool Spiller::look_ahead() {
  if (options_.policy == SpillPolicy::kNever) return false;
  const std::vector<PageKey> oldest = region_.oldest(options_.num_ahead);
  const std::vector<bool> there = store_.contains(oldest);
  const auto now = clock_.now();
  std::map<PageKey, Offer> offers;
  std::vector<Item> items;
  for (std::size_t i = 0; i < oldest.size(); ++i) {
    if (there[i]) continue;
    const auto before = offers_.find(oldest[i]);
    const bool first = before == offers_.end();
    Offer& offer = offers[oldest[i]];
    offer = first ? Offer{now, options_.offer_again_after} : before->second;
    if (now < offer.again) continue;
    offer.again = now + offer.wait;
    offer.wait *= 2;
    auto path = std::make_shared<std::vector<PageKey>>(region_.path_of(oldest[i]));
    const std::size_t depth = path->size();
    path->push_back(oldest[i]);
    items.push_back({oldest[i], std::move(path), depth});
  }
  offers_ = std::move(offers);
  looks_.add();
  std::lock_guard lock(mutex_);
  urgent_.insert(urgent_.end(), std::make_move_iterator(items.begin()), std::make_move_iterator(items.end()));
  return !urgent_.empty();
}

// Pages of one path that follow each other, so that flash sees them as one prefix.
std::vector<Spiller::Item> Spiller::next_batch() {
  std::lock_guard lock(mutex_);
  std::deque<Item>& from = urgent_.empty() ? queue_ : urgent_;
  std::vector<Item> items;
  while (!from.empty() && items.size() < options_.batch_pages) {
    const Item& item = from.front();
    if (!items.empty() && (item.path != items.back().path || item.depth != items.back().depth + 1)) break;
    items.push_back(item);
    from.pop_front();
  }
  if (!items.empty()) busy_ = true;
  return items;
}

std::chrono::steady_clock::duration Spiller::write(const std::vector<Item>& items) {
  const std::uint64_t page_bytes = region_.geometry().page_bytes();
  std::vector<PageKey> keys;
  std::vector<std::uint64_t> addresses;
  std::vector<std::byte*> pieces(region_.geometry().piece_bytes.size());
  for (const Item& item : items) {
    std::byte* at = staging_[keys.size()].bytes().data();
    const std::byte* const start = at;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      pieces[i] = at;
      at += region_.geometry().piece_bytes[i];
    }
    if (!region_.get(item.key, pieces, host::Verify::kAlways)) {
      gone_.add();
      break;  // what follows would be without its parent
    }
    keys.push_back(item.key);
    addresses.push_back(reinterpret_cast<std::uint64_t>(start));
  }
  if (keys.empty()) return {};
  const std::span<const PageKey> prefix = std::span(*items.front().path).first(items.front().depth);
  const auto started = std::chrono::steady_clock::now();
  const auto batch = store_.submit_put({.keys = keys,
                                        .prefix = prefix,
                                        .addresses = addresses,
                                        .lengths = std::span(&page_bytes, 1),
                                        .deadline = {}});
  std::size_t num_refused = keys.size();
  if (batch) {
    batch->ticket.wait();
    num_refused = static_cast<std::size_t>(std::count_if(batch->outcomes->begin(), batch->outcomes->end(),
                                                         [](Code c) { return c != Code::kOk; }));
  }
  spilled_.add(keys.size() - num_refused);
  refused_.add(num_refused);
  // What is refused costs no disk time, and says nothing about the next page: admission judges each.
  if (num_refused == keys.size() || options_.rate_bytes_per_s_max == 0) return {};
  const std::chrono::duration<double> due{static_cast<double>(keys.size() * page_bytes) /
                                          static_cast<double>(options_.rate_bytes_per_s_max)};
  return started + std::chrono::duration_cast<std::chrono::steady_clock::duration>(due) -
         std::chrono::steady_clock::now();
}

bool Spiller::flush(exec::Deadline deadline) {
  std::unique_lock lock(mutex_);
  const auto idle = [this] { return !busy_ && queue_.empty() && urgent_.empty(); };
  if (!deadline) {
    idle_.wait(lock, idle);
    return true;
  }
  return idle_.wait_until(lock, *deadline, idle);
}

void Spiller::discard() {
  std::unique_lock lock(mutex_);
  queue_.clear();
  urgent_.clear();
  idle_.notify_all();
  idle_.wait(lock, [this, before = num_batches_] { return !busy_ || num_batches_ != before; });
}

void Spiller::stop() {
  thread_.request_stop();
  if (thread_.joinable()) thread_.join();
}

std::vector<metrics::Sample> Spiller::samples() const {
  std::lock_guard lock(mutex_);
  return {{"spill_pages_total", spilled_.value()},
          {"spill_pages_refused_total", refused_.value()},
          {"spill_pages_not_queued_total", not_queued_.value()},
          {"spill_pages_gone_total", gone_.value()},
          {"spill_looks_ahead_total", looks_.value()},
          {"spill_pages_queued", std::uint64_t{queue_.size() + urgent_.size()}}};
}

}  // namespace tpusync::tier
