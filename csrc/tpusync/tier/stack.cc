#include "tpusync/tier/stack.h"

#include <fmt/format.h>

#include <algorithm>

namespace tpusync::tier {

using base::Code;
using base::Result;
using exec::Executor;
using index::PageKey;
using index::SlotId;

namespace {

const base::Clock kRealClock;
constexpr std::size_t kQueueLimit = 4096;
constexpr int kNumReadThreads = 2;
constexpr std::size_t kPagesPerPartMin = 4;
constexpr int kNumCopyThreadsMax = 256;
constexpr std::chrono::hours kPinLifetimeMax{1};

Code outcome_of(Code code) {
  return code == Code::kOk ? Code::kNotFound : code;
}

}  // namespace

base::Status StackOptions::validate() const {
  if (num_copy_threads < 1 || num_copy_threads > kNumCopyThreadsMax) {
    return base::fail(Code::kInvalid, fmt::format("num_copy_threads: {}, allowed are 1 to {}",
                                                  num_copy_threads, kNumCopyThreadsMax));
  }
  if (pin_lifetime.count() < 0 || pin_lifetime > kPinLifetimeMax) {
    return base::fail(Code::kInvalid,
                      fmt::format("pin_lifetime_s: {}, allowed are 0 to {}",
                                  std::chrono::duration<double>(pin_lifetime).count(),
                                  std::chrono::duration_cast<std::chrono::seconds>(kPinLifetimeMax).count()));
  }
  return promises.validate();
}

Promised::~Promised() {
  release();
}

void Promised::release() {
  for (const host::Pin& pin : pins_) region_.unpin(pin);
  pins_.clear();
}

// One get. Parts write disjoint outcomes; the last one to end publishes them through the ticket.
struct Stack::Request {
  std::vector<PageKey> keys;
  std::vector<PageKey> prefix;
  std::vector<std::uint64_t> addresses;
  std::vector<host::SlotUse> uses;  // of the slots; none: sealed nowhere
  std::uint64_t epoch = 0;
  exec::Deadline deadline;
  std::size_t num_pieces = 0;
  std::shared_ptr<const std::vector<Peers::Region>> peers;
  std::shared_ptr<std::vector<Code>> outcomes;
  exec::TicketSource source;

  explicit Request(int num_parts) : source(num_parts) {}
  std::span<const std::uint64_t> addresses_of(std::size_t i) const {
    return std::span(addresses).subspan(i * num_pieces, num_pieces);
  }
  index::Ancestry ancestry(std::size_t i) const { return host::ancestry_of(prefix, keys, i); }
};

Stack::Stack(const StackOptions& options, host::Region& region, flash::FlashStore* store,
             Peers::Options peers)
    : options_(options),
      clock_(options.clock != nullptr ? *options.clock : kRealClock),
      region_(region),
      store_(store),
      peers_(std::move(peers), clock_),
      promises_(options.promises, region.geometry().page_bytes(), clock_),
      pins_(region, options.pin_lifetime, clock_) {}

class Stack::Inside {
 public:
  explicit Inside(const Stack& stack) : lock_(stack.life_mutex_), open_(!stack.closed_) {}
  explicit operator bool() const { return open_; }

 private:
  std::shared_lock<std::shared_mutex> lock_;
  const bool open_;
};

Stack::~Stack() {
  close();
}

void Stack::close() {
  {
    std::unique_lock lock(life_mutex_);
    closed_ = true;
  }
  std::lock_guard lock(close_mutex_);
  // In this order: jobs of `copies_` may hand work to `reads_`.
  copies_.reset();
  reads_.reset();
  if (spiller_) spiller_->stop();
  pins_.clear();
}

Result<std::unique_ptr<Stack>> Stack::open(const StackOptions& options, host::Region& region,
                                           flash::FlashStore* store) {
  TPUSYNC_TRY(options.validate());
  const std::string& path = region.file().file().path();
  const Result<host::Registry> registry = host::Registry::open(path.substr(0, path.rfind('/')));
  if (!registry) return tl::unexpected(registry.error());
  std::unique_ptr<Stack> stack(new Stack(options, region, store,
                                         {.registry = *registry,
                                          .name_space = region.file().header().name_space,
                                          .own_path = path,
                                          .geometry = region.geometry(),
                                          .refresh_period = options.peer_refresh_period}));
  Result<std::unique_ptr<Executor>> copies =
      Executor::open({.name = "dram", .num_threads = options.num_copy_threads, .queue_limit = kQueueLimit});
  if (!copies) return tl::unexpected(copies.error());
  Result<std::unique_ptr<Executor>> reads =
      Executor::open({.name = "flash-end", .num_threads = kNumReadThreads, .queue_limit = kQueueLimit});
  if (!reads) return tl::unexpected(reads.error());
  stack->copies_ = std::move(*copies);
  stack->reads_ = std::move(*reads);
  if (store != nullptr)
    stack->spiller_ = std::make_unique<Spiller>(options.spill, region, *store, stack->clock_);
  return stack;
}

Stack::Match Stack::match(std::span<const PageKey> keys, std::span<const PageKey> prefix) {
  const Inside inside(*this);
  return inside ? find(keys, prefix) : Match{};
}

Stack::Match Stack::find(std::span<const PageKey> keys, std::span<const PageKey> prefix) {
  const auto peers = peers_.regions();
  std::vector<bool> on_flash(keys.size());
  std::vector<unsigned char> nearest(keys.size());  // 0 own, 1 peer, 2 flash
  // Touching the whole path on flash, too, keeps a head that is always in DRAM from looking cold there.
  std::size_t flash_end = store_ != nullptr ? store_->match(keys, prefix) : 0;
  std::size_t n = 0;
  for (; n < keys.size(); ++n) {
    if (region_.contains(keys[n])) continue;
    if (Peers::find(*peers, keys[n])) {
      nearest[n] = 1;
      continue;
    }
    if (n >= flash_end && store_ != nullptr) flash_end = n + store_->match(keys.subspan(n), keys.first(n));
    if (n >= flash_end) break;
    nearest[n] = 2;
    on_flash[n] = true;
  }
  Match found;
  found.num_pages = promises_.limit(keys.first(n), on_flash);
  for (std::size_t i = 0; i < found.num_pages; ++i) {
    ++(nearest[i] == 0 ? found.num_own : nearest[i] == 1 ? found.num_peer : found.num_flash);
  }
  const std::span<const PageKey> hit = keys.first(found.num_pages);
  region_.touch(prefix, hit);
  pins_.pin(hit);
  if (spiller_ && !hit.empty()) spiller_->asked_for(prefix, hit);
  counters_.matches.add();
  counters_.keys_asked.add(keys.size());
  counters_.hits_own.add(found.num_own);
  counters_.hits_peer.add(found.num_peer);
  counters_.hits_flash.add(found.num_flash);
  counters_.declined.add(n - found.num_pages);
  return found;
}

Result<flash::BatchTicket> Stack::submit_get(const Get& get) {
  const Inside inside(*this);
  if (inside) return start_get(get);
  return flash::BatchTicket{exec::Ticket(),
                            std::make_shared<std::vector<Code>>(get.keys.size(), Code::kCancelled)};
}

base::Status Stack::check(const Get& get) const {
  const std::size_t num_pieces = region_.file().num_pieces();
  if (get.addresses.size() != get.keys.size() * num_pieces ||
      (!get.slots.empty() && get.slots.size() != get.keys.size())) {
    return base::fail(Code::kInvalid,
                      fmt::format("{} keys with {} addresses and {} slots: a page has {} pieces",
                                  get.keys.size(), get.addresses.size(), get.slots.size(), num_pieces));
  }
  for (std::size_t i = 0; i < get.slots.size(); ++i) {
    if (index::to_number(get.slots[i]) >= region_.geometry().num_slots) {
      return base::fail(Code::kInvalid,
                        fmt::format("slot {}: the region has {}", index::to_number(get.slots[i]),
                                    region_.geometry().num_slots));
    }
    for (std::size_t p = 0; p < num_pieces; ++p) {
      if (get.addresses[i * num_pieces + p] ==
          reinterpret_cast<std::uint64_t>(region_.piece(get.slots[i], p).data())) {
        continue;
      }
      return base::fail(Code::kInvalid,
                        fmt::format("address {} of page {} is not where slot {} has that piece", p, i,
                                    index::to_number(get.slots[i])));
    }
  }
  return {};
}

Result<flash::BatchTicket> Stack::start_get(const Get& get) {
  TPUSYNC_TRY(check(get));
  std::uint64_t epoch = 0;
  {
    std::shared_lock lock(clear_mutex_);
    epoch = epoch_;
  }
  Result<std::vector<host::SlotUse>> uses = region_.begin_write(get.slots);
  if (!uses) return tl::unexpected(uses.error());
  const auto peers = peers_.regions();
  std::vector<std::size_t> near, far;
  for (std::size_t i = 0; i < get.keys.size(); ++i) {
    const bool in_dram =
        store_ == nullptr || region_.contains(get.keys[i]) || Peers::find(*peers, get.keys[i]);
    (in_dram ? near : far).push_back(i);
  }
  const auto num_threads = static_cast<std::size_t>(options_.num_copy_threads);
  const std::size_t part_pages = std::max(kPagesPerPartMin, (near.size() + num_threads - 1) / num_threads);
  const std::size_t num_copy_parts = (near.size() + part_pages - 1) / part_pages;
  auto request = std::make_shared<Request>(static_cast<int>(num_copy_parts + 1));
  request->keys.assign(get.keys.begin(), get.keys.end());
  request->prefix.assign(get.prefix.begin(), get.prefix.end());
  request->addresses.assign(get.addresses.begin(), get.addresses.end());
  request->uses = std::move(*uses);
  request->epoch = epoch;
  request->deadline = get.deadline;
  request->num_pieces = region_.file().num_pieces();
  request->peers = peers;
  request->outcomes = std::make_shared<std::vector<Code>>(get.keys.size(), Code::kNotFound);
  request->source.start();
  // Flash first: its reads are under way while DRAM is copied.
  read_pages(request, std::move(far));
  for (std::size_t begin = 0; begin < near.size(); begin += part_pages) {
    const std::size_t end = std::min(begin + part_pages, near.size());
    std::vector<std::size_t> pages(near.begin() + static_cast<std::ptrdiff_t>(begin),
                                   near.begin() + static_cast<std::ptrdiff_t>(end));
    const base::Status queued = copies_->submit([this, request, pages] { copy_pages(request, pages); });
    if (queued) continue;
    for (const std::size_t i : pages) (*request->outcomes)[i] = queued.error().code;
    end_part(request);
  }
  return flash::BatchTicket{request->source.ticket(), request->outcomes};
}

// Seals page `i`, which has arrived, by `seal(key, ancestry, use)`: whether it could be sealed or not, it has
// been delivered.
template <typename Seal>
void Stack::seal_landed(const Request& request, std::size_t i, const Seal& seal) {
  if (request.uses.empty()) return;
  std::shared_lock lock(clear_mutex_);
  if (request.epoch == epoch_) (void)seal(request.keys[i], request.ancestry(i), request.uses[i]);
}

// Ends one part of the request, here or, for what was evicted from DRAM meanwhile, after a read from flash.
void Stack::copy_pages(const std::shared_ptr<Request>& request, std::vector<std::size_t> pages) {
  std::vector<std::size_t> left;
  for (const std::size_t i : pages) {
    Code code = Code::kCancelled;
    if (request->deadline && std::chrono::steady_clock::now() >= *request->deadline) {
      code = Code::kDeadline;
    } else if (!request->source.cancel_requested()) {
      code = copy_page(*request, i);
    }
    (*request->outcomes)[i] = code;
    const bool gone = code == Code::kNotFound || code == Code::kCorrupt;
    if (gone && store_ != nullptr && store_->contains(std::span(&request->keys[i], 1))[0]) left.push_back(i);
  }
  if (left.empty()) return end_part(request);
  read_pages(request, std::move(left));
}

Code Stack::copy_page(Request& request, std::size_t i) {
  const PageKey& key = request.keys[i];
  std::vector<std::byte*> pieces;
  for (const std::uint64_t address : request.addresses_of(i))
    pieces.push_back(reinterpret_cast<std::byte*>(address));
  const auto landed = [&](std::uint64_t checksum) {
    seal_landed(request, i, [&](const PageKey& page, index::Ancestry ancestry, host::SlotUse use) {
      return region_.seal_known(page, ancestry, use, checksum);
    });
    return Code::kOk;
  };
  const Result<host::Seal> own = region_.get(key, pieces);
  pins_.unpin(std::span(&key, 1));
  if (own) {
    counters_.got_own.add();
    return landed(own->payload_checksum);
  }
  Code code = own.error().code;
  if (code == Code::kCorrupt) counters_.corrupt.add();
  for (const Peers::Region& peer : *request.peers) {
    const auto found = peer->find(key);
    if (!found) continue;
    const base::Status copied = peer->copy(*found, key, pieces);
    if (copied) {
      counters_.got_peer.add();
      return landed(found->seal.payload_checksum);
    }
    code = copied.error().code;
    if (code == Code::kCorrupt) counters_.corrupt.add();
  }
  counters_.missed.add();
  return outcome_of(code);
}

// Takes one part of the request over, and ends it when the pages are there.
void Stack::read_pages(const std::shared_ptr<Request>& request, std::vector<std::size_t> pages) {
  if (pages.empty() || store_ == nullptr) return end_part(request);
  std::vector<PageKey> keys;
  std::vector<std::uint64_t> addresses;
  for (const std::size_t i : pages) {
    keys.push_back(request->keys[i]);
    const auto of_page = request->addresses_of(i);
    addresses.insert(addresses.end(), of_page.begin(), of_page.end());
  }
  std::vector<PageKey> prefix = request->prefix;
  prefix.insert(prefix.end(), request->keys.begin(),
                request->keys.begin() + static_cast<std::ptrdiff_t>(pages.front()));
  const auto started = std::chrono::steady_clock::now();
  Result<flash::BatchTicket> batch = store_->submit_get({.keys = keys,
                                                         .prefix = prefix,
                                                         .addresses = addresses,
                                                         .lengths = region_.geometry().piece_bytes,
                                                         .deadline = request->deadline});
  if (!batch) {
    for (const std::size_t i : pages) (*request->outcomes)[i] = batch.error().code;
    return end_part(request);
  }
  const auto finish = [this, request, pages = std::move(pages), batch = *batch, started] {
    finish_read(request, pages, batch, started);
  };
  // A full queue: the thread that asked waits itself, since bytes may still move into the caller's memory.
  if (!reads_->submit(finish)) finish();
}

void Stack::finish_read(const std::shared_ptr<Request>& request, const std::vector<std::size_t>& pages,
                        const flash::BatchTicket& batch, std::chrono::steady_clock::time_point started) {
  batch.ticket.wait();
  std::size_t num_read = 0;
  for (std::size_t k = 0; k < pages.size(); ++k) {
    const std::size_t i = pages[k];
    const Code code = (*batch.outcomes)[k];
    (*request->outcomes)[i] = code;
    num_read += code == Code::kOk;
    if (code == Code::kOk) {
      counters_.got_flash.add();
    } else {
      (code == Code::kCorrupt ? counters_.corrupt : counters_.missed).add();
    }
  }
  if (num_read == pages.size()) promises_.measured(num_read, std::chrono::steady_clock::now() - started);
  for (const std::size_t i : pages) {
    if ((*request->outcomes)[i] != Code::kOk) continue;
    seal_landed(*request, i, [&](const PageKey& page, index::Ancestry ancestry, host::SlotUse use) {
      return region_.seal_bytes(page, ancestry, use);
    });
  }
  end_part(request);
}

void Stack::end_part(const std::shared_ptr<Request>& request) {
  request->source.finish_part({});
}

std::vector<Code> Stack::put(std::span<const PageKey> prefix, std::span<const PageKey> keys,
                             std::span<const SlotId> slots) {
  const Inside inside(*this);
  if (!inside) return std::vector<Code>(keys.size(), Code::kCancelled);
  std::shared_lock lock(clear_mutex_);
  std::vector<Code> outcomes = region_.seal(prefix, keys, slots);
  if (spiller_) spiller_->sealed(prefix, keys);
  return outcomes;
}

// Fetches pages into slots of the own region and gives the slots back with the pages in them.
void Stack::fetch(std::span<const PageKey> keys, std::span<const PageKey> prefix, exec::Deadline deadline,
                  const std::function<void()>& before_free) {
  std::vector<SlotId> slots;
  // As many as there are slots for.
  while (!keys.empty() && (slots = region_.alloc(keys.size())).empty()) keys = keys.first(keys.size() - 1);
  std::vector<std::uint64_t> addresses;
  for (const SlotId slot : slots) {
    for (std::size_t piece = 0; piece < region_.file().num_pieces(); ++piece) {
      addresses.push_back(reinterpret_cast<std::uint64_t>(region_.piece(slot, piece).data()));
    }
  }
  const Result<flash::BatchTicket> got = start_get(
      {.keys = keys, .prefix = prefix, .addresses = addresses, .slots = slots, .deadline = deadline});
  if (got) got->ticket.wait();
  before_free();
  (void)region_.free(slots);
}

std::unique_ptr<Promised> Stack::promise(std::span<const PageKey> keys, std::span<const PageKey> prefix,
                                         exec::Deadline deadline) {
  const Inside inside(*this);
  if (!inside) return std::make_unique<Promised>(region_, std::vector<host::Pin>());
  const std::span<const PageKey> hit = keys.first(find(keys, prefix).num_pages);
  std::vector<std::optional<host::Pin>> pins;
  for (const PageKey& key : hit) pins.push_back(region_.pin(key, host::PinKind::kFirm));
  // Run by run of pages that are not here: each continues what is before it.
  std::vector<PageKey> before(prefix.begin(), prefix.end());
  for (std::size_t begin = 0, end = 0; begin < hit.size(); begin = end) {
    while (end < hit.size() && pins[end].has_value() == pins[begin].has_value()) ++end;
    if (!pins[begin]) {
      fetch(hit.subspan(begin, end - begin), before, deadline, [&] {
        for (std::size_t i = begin; i < end; ++i) pins[i] = region_.pin(hit[i], host::PinKind::kFirm);
      });
      if (!pins[end - 1]) break;  // the answer ends before it
    }
    before.insert(before.end(), hit.begin() + static_cast<std::ptrdiff_t>(begin),
                  hit.begin() + static_cast<std::ptrdiff_t>(end));
  }
  std::size_t num_certain = 0;
  while (num_certain < hit.size() && pins[num_certain] && region_.verify(hit[num_certain])) ++num_certain;
  std::vector<host::Pin> kept;
  for (std::size_t i = 0; i < pins.size(); ++i) {
    if (!pins[i]) continue;
    if (i < num_certain) {
      kept.push_back(*pins[i]);
    } else {
      region_.unpin(*pins[i]);
    }
  }
  return std::make_unique<Promised>(region_, std::move(kept));
}

bool Stack::flush(exec::Deadline deadline) {
  const Inside inside(*this);
  return !inside || !spiller_ || spiller_->flush(deadline);
}

Stack::Dropped Stack::remove(std::span<const PageKey> keys) {
  const Inside inside(*this);
  if (!inside) return {};
  Dropped dropped{.num_dram = region_.remove(keys)};
  if (store_ != nullptr) dropped.num_flash = store_->remove(keys);
  return dropped;
}

Stack::Dropped Stack::clear() {
  const Inside inside(*this);
  if (!inside) return {};
  Dropped dropped;
  {
    std::unique_lock lock(clear_mutex_);
    ++epoch_;
    dropped.num_dram = region_.clear();
  }
  // DRAM first: what the spiller takes from it afterwards is new.
  if (spiller_) spiller_->discard();
  if (store_ != nullptr) dropped.num_flash = store_->clear();
  return dropped;
}

std::vector<metrics::Sample> Stack::samples() const {
  std::vector<metrics::Sample> samples = {
      {"tier_matches_total", counters_.matches.value()},
      {"tier_match_keys_total", counters_.keys_asked.value()},
      {"tier_match_own_pages_total", counters_.hits_own.value()},
      {"tier_match_peer_pages_total", counters_.hits_peer.value()},
      {"tier_match_flash_pages_total", counters_.hits_flash.value()},
      {"tier_match_declined_pages_total", counters_.declined.value()},
      {"tier_get_own_pages_total", counters_.got_own.value()},
      {"tier_get_peer_pages_total", counters_.got_peer.value()},
      {"tier_get_flash_pages_total", counters_.got_flash.value()},
      {"tier_get_missed_pages_total", counters_.missed.value()},
      {"tier_get_corrupt_pages_total", counters_.corrupt.value()},
      {"tier_pinned_pages", std::uint64_t{pins_.size()}},
  };
  if (const std::optional<double> rate = promises_.rate_bytes_per_s()) {
    samples.push_back({"tier_flash_rate_bytes_per_s", *rate});
  }
  if (spiller_) {
    for (metrics::Sample& sample : spiller_->samples()) samples.push_back(std::move(sample));
  }
  return samples;
}

}  // namespace tpusync::tier
