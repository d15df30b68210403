#include "tpusync/flash/node.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "tpusync/base/log.h"
#include "tpusync/flash/limits.h"

namespace tpusync::flash {

using base::Code;
using base::LogLevel;
using base::Result;
using base::Status;

namespace {

constexpr int kNumRegionsMax = 1000;
constexpr std::size_t kIdentityBytesMax = base::kMiB;
// A process that was stopped while it held the directory must not stop the others.
constexpr std::chrono::milliseconds kLockPatience{200};
constexpr std::chrono::seconds kOpenPatience{10};
constexpr std::chrono::milliseconds kLockPoll{1};

bool ends_with(const std::string& name, std::string_view suffix) {
  return name.size() >= suffix.size() && std::string_view(name).substr(name.size() - suffix.size()) == suffix;
}

}  // namespace

// Holds the directory's lock, against other processes and other threads of this one.
class Node::Lock {
 public:
  Lock(Node& node, std::chrono::milliseconds patience) : node_(node) {
    const auto until = std::chrono::steady_clock::now() + patience;
    while (!(held_ = try_both()) && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(kLockPoll);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() {
    if (!held_) return;
    node_.lock_file_->unlock();
    node_.mutex_.unlock();
  }
  bool held() const { return held_; }

 private:
  bool try_both() {
    if (!node_.mutex_.try_lock()) return false;
    const auto locked = node_.lock_file_->try_lock();
    if (locked && *locked) return true;
    node_.mutex_.unlock();
    return false;
  }

  Node& node_;
  bool held_ = false;
};

Node::Node(os::FileSystem& files, const base::Clock& clock, const FlashOptions& options, Counters& counters)
    : files_(files), clock_(clock), counters_(counters), path_{options.path} {}

Result<std::unique_ptr<Node>> Node::open(os::FileSystem& files, const base::Clock& clock,
                                         const FlashOptions& options, Counters& counters) {
  std::unique_ptr<Node> node(new Node(files, clock, options, counters));
  TPUSYNC_TRY(prepare_store_path(files, node->path_, options.allow_tmpfs));
  auto lock_file = files.open(node->path_.lock(), {.create = true});
  if (!lock_file) {
    return base::fail(Code::kInvalid,
                      fmt::format("path: {} cannot be written: {}", options.path, lock_file.error().message));
  }
  node->lock_file_ = std::move(*lock_file);
  TPUSYNC_TRY(node->choose_limits(options));
  return node;
}

Status Node::choose_limits(const FlashOptions& options) {
  const auto space = files_.space(path_.root);
  if (!space) return tl::unexpected(space.error());
  const auto used = used_bytes();
  if (!used) return tl::unexpected(used.error());
  const auto limits = flash::choose_limits(options, *space, *used);
  if (!limits) return tl::unexpected(limits.error());
  capacity_bytes_ = limits->capacity_bytes;
  floor_bytes_ = limits->floor_bytes;
  budget_bytes_per_day_ = limits->budget_bytes_per_day;
  if (space->available_bytes + *used < floor_bytes_) {
    base::log(LogLevel::kWarning,
              fmt::format("{}: {} bytes are free, less than the floor of {}: nothing will be stored there",
                          path_.root, space->available_bytes, floor_bytes_));
  }
  return {};
}

// ---------------------------------------------------------------- regions

Status Node::write_identity(const FlashOptions& options) {
  const std::string directory = path_.name_space(options.name_space);
  TPUSYNC_TRY(files_.make_directory(directory, 0700));
  const auto names = files_.list(directory);
  if (!names) return tl::unexpected(names.error());
  for (const std::string& name : *names) {
    // Left behind by a process that was killed while it replaced a file.
    if (ends_with(name, os::kTemporarySuffix)) (void)files_.remove(directory + "/" + name);
  }
  const std::string path = directory + "/" + std::string(kNamespaceFile);
  const auto text = os::read_text(files_, path, kIdentityBytesMax);
  if (text && *text == options.namespace_json) return {};
  return os::replace_text(files_, path, options.namespace_json);
}

Result<std::unique_ptr<Region>> Node::adopt_region(const FlashOptions& options, bool direct) {
  const Lock lock(*this, kOpenPatience);
  if (!lock.held())
    return base::fail(Code::kIo, fmt::format("{} stays locked by another process", path_.lock()));
  TPUSYNC_TRY(write_identity(options));
  Region::Options region_options{.directory = path_.name_space(options.name_space),
                                 .number = 0,
                                 .name_space = options.name_space,
                                 .page_bytes = options.page_bytes,
                                 .direct = direct,
                                 .process_id = static_cast<std::uint32_t>(::getpid()),
                                 .now_unix_ns = clock_.unix_ns()};
  for (; region_options.number < kNumRegionsMax; ++region_options.number) {
    auto region = Region::open(files_, region_options);
    if (region || region.error().code != Code::kBusy) return region;
    base::log(LogLevel::kInfo, fmt::format("{}; trying the next region", region.error().message));
  }
  return base::fail(Code::kIo,
                    fmt::format("all {} regions of {} are locked", kNumRegionsMax, region_options.directory));
}

// ---------------------------------------------------------------- space

// Only what is ours: others may keep their files in the same directory, environments and models for instance.
Result<std::uint64_t> Node::used_bytes() const {
  return disk_bytes_below(files_, path_.version_directory());
}

void Node::add_regions(const std::string& directory, Usage& usage) const {
  const auto names = files_.list(directory);
  if (!names) return;
  for (const std::string& name : *names) {
    if (!ends_with(name, kTableSuffix)) continue;
    RegionFiles region{.base_path = directory + "/" + name.substr(0, name.size() - kTableSuffix.size())};
    for (const std::string_view suffix : {kTableSuffix, kSlotsSuffix}) {
      const auto info = files_.info(region.base_path + std::string(suffix));
      if (!info) continue;
      region.disk_bytes += info->disk_bytes;
      region.modified_unix_ns = std::max(region.modified_unix_ns, info->modified_unix_ns);
    }
    usage.region_bytes += region.disk_bytes;
    auto table = files_.open(directory + "/" + name, {.write = false});
    const auto locked = table ? (*table)->try_lock() : Result<bool>(false);
    if (locked && *locked) {
      usage.dead.push_back(std::move(region));
    } else {
      ++usage.num_live;
    }
  }
}

Result<Node::Usage> Node::usage() const {
  Usage usage;
  const auto total = used_bytes();
  if (!total) return tl::unexpected(total.error());
  usage.total_bytes = *total;
  const auto names = files_.list(path_.version_directory());
  if (!names) return tl::unexpected(names.error());
  for (const std::string& name : *names) add_regions(path_.version_directory() + "/" + name, usage);
  std::sort(usage.dead.begin(), usage.dead.end(), [](const RegionFiles& a, const RegionFiles& b) {
    return a.modified_unix_ns < b.modified_unix_ns;
  });
  return usage;
}

Result<std::uint64_t> Node::room_bytes(const Usage& usage) const {
  const auto space = files_.space(path_.root);
  if (!space) return tl::unexpected(space.error());
  const std::uint64_t below_capacity = capacity_bytes_ - std::min(capacity_bytes_, usage.total_bytes);
  const std::uint64_t above_floor = space->available_bytes - std::min(space->available_bytes, floor_bytes_);
  return std::min(below_capacity, above_floor);
}

// What the directory may hold now: its capacity, or less while others leave less free than the floor.
std::uint64_t Node::allowed_bytes(std::uint64_t total_bytes) const {
  const auto space = files_.space(path_.root);
  if (!space || space->available_bytes >= floor_bytes_) return capacity_bytes_;
  const std::uint64_t missing = floor_bytes_ - space->available_bytes;
  return std::min(capacity_bytes_, total_bytes - std::min(total_bytes, missing));
}

// What each region with a process may hold at least: an equal part of what directories and small files leave.
std::uint64_t Node::share_bytes(const Usage& usage, std::uint64_t allowed_bytes) const {
  const std::uint64_t overhead = usage.total_bytes - std::min(usage.total_bytes, usage.region_bytes);
  return (allowed_bytes - std::min(allowed_bytes, overhead)) / std::max(1u, usage.num_live);
}

// Deletes a region that nobody writes; slots first, so that a crash in between leaves a table, which is
// adopted.
bool Node::reclaim(const RegionFiles& region) {
  const std::string table_path = region.base_path + std::string(kTableSuffix);
  auto table = files_.open(table_path, {.write = false});
  if (!table) return false;
  const auto locked = (*table)->try_lock();
  if (!locked || !*locked) return false;
  const Status removed = files_.remove(region.base_path + std::string(kSlotsSuffix));
  if (!removed && removed.error().code != Code::kNotFound) {
    base::log(LogLevel::kWarning, fmt::format("{}: its space cannot be reclaimed", removed.error().message));
    return false;
  }
  if (!files_.remove(table_path)) return false;
  counters_.regions_reclaimed.add();
  base::log(LogLevel::kInfo, fmt::format("{}: reclaimed {} bytes of a region that no process uses",
                                         region.base_path, region.disk_bytes));
  return true;
}

void Node::set_want(bool wanted) {
  if (wanted) {
    (void)files_.open(path_.want(), {.create = true});
  } else {
    (void)files_.remove(path_.want());
  }
}

Status Node::grow(const Region& region, std::uint32_t own_slots, std::uint32_t num_wanted,
                  const std::function<Status(std::uint32_t)>& grow) {
  const Lock lock(*this, kLockPatience);
  if (!lock.held()) return base::fail(Code::kExhausted, fmt::format("{} is locked", path_.lock()));
  auto now = usage();
  if (!now) return tl::unexpected(now.error());
  auto room = room_bytes(*now);
  const std::uint64_t slot_disk_bytes = region.disk_bytes_of(1);
  const bool below_share =
      region.disk_bytes_of(own_slots) + region.slot_bytes() <= share_bytes(*now, capacity_bytes_);
  for (std::size_t i = 0; room && *room < slot_disk_bytes && below_share && i < now->dead.size(); ++i) {
    if (!reclaim(now->dead[i])) continue;
    now->total_bytes -= std::min(now->total_bytes, now->dead[i].disk_bytes);
    room = room_bytes(*now);
  }
  if (!room) return tl::unexpected(room.error());
  // A region that has its share does not take what another one waits for.
  std::uint32_t num_more = below_share || !files_.info(path_.want()) ? num_wanted : 0;
  while (num_more > 0 && region.disk_bytes_of(num_more) > *room) {
    num_more = std::min<std::uint64_t>(num_more - 1, *room / region.slot_bytes());
  }
  if (num_more == 0) {
    if (below_share && now->num_live > 1) set_want(true);
    return base::fail(Code::kExhausted, fmt::format("{}: {} of {} bytes used, {} free, floor {}", path_.root,
                                                    now->total_bytes, capacity_bytes_, *room, floor_bytes_));
  }
  set_want(false);
  return grow(num_more);
}

std::uint32_t Node::slots_to_give_back(const Region& region, std::uint32_t own_slots,
                                       std::uint32_t num_extent) {
  const auto total = used_bytes();
  const bool too_much = total && *total > allowed_bytes(*total);
  if (own_slots == 0 || (!too_much && !files_.info(path_.want()))) return 0;
  const Lock lock(*this, kLockPatience);
  auto now = lock.held() ? usage() : Result<Usage>(base::fail(Code::kBusy, "locked"));
  if (!now) return 0;
  const std::uint64_t allowed = allowed_bytes(now->total_bytes);
  for (std::size_t i = 0; now->total_bytes > allowed && i < now->dead.size(); ++i) {
    if (reclaim(now->dead[i])) now->total_bytes -= std::min(now->total_bytes, now->dead[i].disk_bytes);
  }
  const std::uint64_t own_bytes = region.disk_bytes_of(own_slots);
  const std::uint64_t share = share_bytes(*now, allowed);
  if (own_bytes <= share) return 0;
  const std::uint64_t slot_bytes = region.slot_bytes();
  const std::uint64_t num_above =
      std::min<std::uint64_t>(own_slots, (own_bytes - share + slot_bytes - 1) / slot_bytes);
  // What is above the capacity goes at once. For the floor, or for another region, an extent at a time:
  // others may give disk space back, too.
  const std::uint64_t excess = now->total_bytes - std::min(now->total_bytes, capacity_bytes_);
  const std::uint64_t num_at_once = excess > 0 ? (excess + slot_bytes - 1) / slot_bytes : num_extent;
  return static_cast<std::uint32_t>(std::min(num_above, num_at_once));
}

// ---------------------------------------------------------------- write budget

// As of now; a full bucket for a file that is new or that cannot be right, and `reset` for the latter.
Ledger Node::read_ledger(const os::File& file, bool& reset) const {
  std::array<std::byte, kLedgerBytes> bytes{};
  const auto num_read = os::read_bytes(file, bytes, 0);
  const bool is_new = num_read && *num_read == 0;
  auto ledger = num_read && *num_read == bytes.size() ? decode_ledger(bytes) : std::nullopt;
  reset = !ledger && !is_new;
  if (!ledger) ledger = Ledger::begin(budget_bytes_per_day_, clock_.unix_ns());
  if (!ledger->refill(budget_bytes_per_day_, clock_.unix_ns())) reset = true;
  ledger->left_bytes = std::min(ledger->left_bytes, budget_bytes_per_day_);
  return *ledger;
}

template <typename Change>
void Node::change_ledger(Change change) {
  const Lock lock(*this, kLockPatience);
  if (!lock.held()) return;
  auto file = files_.open(path_.ledger(), {.create = true});
  if (!file) return;
  bool reset = false;
  Ledger ledger = read_ledger(**file, reset);
  if (reset) counters_.ledger_resets.add();
  change(ledger);
  (void)os::write_bytes(**file, encode_ledger(ledger), 0);
}

std::uint64_t Node::lease_budget(std::uint64_t bytes) {
  std::uint64_t taken = 0;
  change_ledger([&](Ledger& ledger) { taken = ledger.take(bytes); });
  return taken;
}

void Node::return_budget(std::uint64_t bytes) {
  if (bytes == 0) return;
  change_ledger([&](Ledger& ledger) { ledger.give_back(bytes, budget_bytes_per_day_); });
}

std::uint64_t Node::budget_left_bytes() const {
  const auto file = files_.open(path_.ledger(), {.write = false});
  bool reset = false;
  return file ? read_ledger(**file, reset).left_bytes : budget_bytes_per_day_;
}

}  // namespace tpusync::flash
