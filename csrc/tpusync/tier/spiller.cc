#include "tpusync/tier/spiller.h"

#include <pthread.h>

#include <algorithm>

namespace tpusync::tier {

using base::Code;
using index::PageKey;

Spiller::Spiller(const SpillOptions& options, host::Region& region, flash::FlashStore& store)
    : options_(options), region_(region), store_(store) {
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
    if (there[i]) continue;
    if (queue_.size() >= options_.queue_limit) {
      not_queued_.add();
      continue;
    }
    queue_.push_back({keys[i], path, prefix.size() + i});
  }
  wake_.notify_all();
}

void Spiller::run(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    const std::vector<Item> items = next_batch();
    if (!items.empty()) {
      write(items, stop);
      continue;
    }
    if (look_ahead()) continue;
    std::unique_lock lock(mutex_);
    busy_ = false;
    idle_.notify_all();
    wake_.wait_for(lock, stop, options_.look_ahead_period,
                   [this] { return !queue_.empty() || !urgent_.empty(); });
  }
  std::lock_guard lock(mutex_);
  busy_ = false;
  idle_.notify_all();
}

// Looks for pages that will be evicted soon and are not on flash yet.
bool Spiller::look_ahead() {
  if (options_.policy == SpillPolicy::kNever) return false;
  const std::vector<PageKey> oldest = region_.oldest(options_.num_ahead);
  const std::vector<bool> there = store_.contains(oldest);
  std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < oldest.size(); ++i) {
    if (there[i]) continue;
    auto path = std::make_shared<std::vector<PageKey>>(region_.path_of(oldest[i]));
    const std::size_t depth = path->size();
    path->push_back(oldest[i]);
    urgent_.push_back({oldest[i], std::move(path), depth});
  }
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

void Spiller::write(const std::vector<Item>& items, const std::stop_token& stop) {
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
  if (keys.empty()) return;
  const std::span<const PageKey> prefix = std::span(*items.front().path).first(items.front().depth);
  const auto started = std::chrono::steady_clock::now();
  const auto batch = store_.submit_put({.keys = keys,
                                        .prefix = prefix,
                                        .addresses = addresses,
                                        .lengths = std::span(&page_bytes, 1),
                                        .deadline = {}});
  if (!batch) return refused_.add(keys.size());
  batch->ticket.wait();
  std::size_t num_refused = 0;
  for (const Code code : *batch->outcomes) num_refused += code != Code::kOk;
  spilled_.add(keys.size() - num_refused);
  refused_.add(num_refused);
  if (num_refused > 0) {
    pause(options_.refused_pause, stop);
  } else if (options_.rate_bytes_per_s_max > 0) {
    const double due_s =
        static_cast<double>(keys.size() * page_bytes) / static_cast<double>(options_.rate_bytes_per_s_max);
    const auto due =
        std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(due_s));
    pause(started + due - std::chrono::steady_clock::now(), stop);
  }
}

void Spiller::pause(std::chrono::steady_clock::duration duration, const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  wake_.wait_for(lock, stop, duration, [] { return false; });
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

std::vector<metrics::Sample> Spiller::samples() const {
  std::lock_guard lock(mutex_);
  return {{"spill_pages_total", spilled_.value()},
          {"spill_pages_refused_total", refused_.value()},
          {"spill_pages_not_queued_total", not_queued_.value()},
          {"spill_pages_gone_total", gone_.value()},
          {"spill_pages_queued", std::uint64_t{queue_.size() + urgent_.size()}}};
}

}  // namespace tpusync::tier
