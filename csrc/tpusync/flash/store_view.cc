#include "tpusync/flash/store_view.h"

#include <fmt/format.h>

#include <algorithm>

#include "tpusync/flash/region.h"
#include "tpusync/flash/region_reader.h"
#include "tpusync/flash/store_lock.h"

namespace tpusync::flash {

using base::Code;
using base::Result;
using base::Status;

namespace {

constexpr std::chrono::milliseconds kPatience{1000};
constexpr std::size_t kIdentityBytesMax = base::kMiB;
constexpr std::size_t kNumNameDigits = 32;
constexpr std::size_t kNumRegionDigitsMin = 3;
constexpr std::string_view kRegionPrefix = "region-";

bool is_namespace_name(std::string_view name) {
  return name.size() == kNumNameDigits && name.find_first_not_of("0123456789abcdef") == name.npos;
}

// The region of a file called region-NNN<suffix>; empty for any other.
std::string_view region_of(std::string_view file, std::string_view suffix) {
  if (!file.starts_with(kRegionPrefix) || !file.ends_with(suffix)) return {};
  const std::string_view digits =
      file.substr(kRegionPrefix.size(), file.size() - kRegionPrefix.size() - suffix.size());
  const bool is_number =
      digits.size() >= kNumRegionDigitsMin && digits.find_first_not_of("0123456789") == digits.npos;
  return is_number ? file.substr(0, kRegionPrefix.size() + digits.size()) : std::string_view{};
}

RegionInfo& region_named(NamespaceInfo& info, std::string_view name) {
  const auto found =
      std::ranges::find_if(info.regions, [&](const RegionInfo& region) { return region.name == name; });
  if (found != info.regions.end()) return *found;
  info.regions.push_back({.name = std::string(name)});
  return info.regions.back();
}

void add_file(os::FileSystem& files, const std::string& directory, const std::string& file, bool is_table,
              RegionInfo& region) {
  const auto info = files.info(directory + "/" + file);
  if (!info) return;
  (is_table ? region.has_table : region.has_slots) = true;
  (is_table ? region.table_bytes : region.slots_bytes) = info->size_bytes;
  region.disk_bytes += info->disk_bytes;
  region.modified_unix_ns = std::max(region.modified_unix_ns, info->modified_unix_ns);
}

// `lock_held`: with the directory's lock, a region's lock may be tried without getting into anybody's way.
void look_into(os::FileSystem& files, const std::string& directory, bool lock_held, RegionInfo& region) {
  if (!region.has_table) return;
  const std::string path = directory + "/" + region.name + std::string(kTableSuffix);
  auto table = files.open(path, {.write = false});
  const auto head = table ? read_table_head(**table) : Result<TableHead>(tl::unexpected(table.error()));
  if (!head) {
    region.trouble = head.error().message;
    region.writer_state = WriterState::kUnknown;
    return;
  }
  region.header = head->header;
  region.writer = head->writer;
  const auto locked = lock_held ? (*table)->try_lock() : Result<bool>(base::fail(Code::kBusy, ""));
  region.writer_state = !locked ? WriterState::kUnknown : *locked ? WriterState::kNone : WriterState::kLive;
}

NamespaceInfo view_namespace(os::FileSystem& files, const std::string& directory, const std::string& name,
                             bool lock_held) {
  NamespaceInfo info{.name = name};
  const auto names = files.list(directory);
  if (!names) return info;
  for (const std::string& file : *names) {
    const std::string_view table = region_of(file, kTableSuffix);
    const std::string_view slots = region_of(file, kSlotsSuffix);
    if (!table.empty() || !slots.empty()) {
      add_file(files, directory, file, !table.empty(), region_named(info, table.empty() ? slots : table));
    } else if (file.ends_with(os::kTemporarySuffix)) {
      info.temporaries.push_back(file);
    } else if (file == kNamespaceFile) {
      info.json = os::read_text(files, directory + "/" + file, kIdentityBytesMax).value_or("");
    } else {
      info.strangers.push_back(file);
    }
  }
  for (RegionInfo& region : info.regions) look_into(files, directory, lock_held, region);
  return info;
}

void view_ledger(os::FileSystem& files, const StorePath& path, StoreInfo& info) {
  const auto file = files.open(path.ledger(), {.write = false});
  if (!file) return;
  std::array<std::byte, kLedgerBytes> bytes{};
  const auto num_read = os::read_bytes(**file, bytes, 0);
  if (num_read && *num_read == bytes.size()) info.ledger = decode_ledger(bytes);
  info.ledger_damaged = !info.ledger;
}

// What is below v1.
Status view_version(os::FileSystem& files, const StorePath& path, StoreInfo& info) {
  const auto names = files.list(path.version_directory());
  if (!names) return tl::unexpected(names.error());
  for (const std::string& name : *names) {
    const std::string full = path.version_directory() + "/" + name;
    const bool is_ours = full == path.lock() || full == path.ledger() || full == path.want();
    if (!is_ours && !is_namespace_name(name)) info.strangers.push_back(name);
  }
  const auto used = disk_bytes_below(files, path.version_directory());
  if (!used) return tl::unexpected(used.error());
  info.used_bytes = *used;
  info.wants_space = files.info(path.want()).has_value();
  const auto lock = StoreLock::acquire(files, path, kPatience);
  // Without a lock file nobody has adopted anything yet.
  auto namespaces = view_namespaces(files, path, lock || lock.error().code == Code::kNotFound);
  if (!namespaces) return tl::unexpected(std::move(namespaces).error());
  info.namespaces = std::move(*namespaces);
  // Whoever changes it holds the lock, too: with it, what is read is never torn.
  view_ledger(files, path, info);
  return {};
}

}  // namespace

Result<std::vector<NamespaceInfo>> view_namespaces(os::FileSystem& files, const StorePath& path,
                                                   bool lock_held) {
  const auto names = files.list(path.version_directory());
  if (!names) return tl::unexpected(names.error());
  std::vector<NamespaceInfo> namespaces;
  for (const std::string& name : *names) {
    if (!is_namespace_name(name)) continue;
    namespaces.push_back(view_namespace(files, path.version_directory() + "/" + name, name, lock_held));
  }
  return namespaces;
}

Result<StoreInfo> view_store(os::FileSystem& files, const StorePath& path) {
  const auto root = files.info(path.root);
  if (!root) return tl::unexpected(root.error());
  if (!root->is_directory) {
    return base::fail(Code::kInvalid, fmt::format("path: {} is not a directory", path.root));
  }
  const auto names = files.list(path.root);
  if (!names) return tl::unexpected(names.error());
  StoreInfo info;
  const auto space = files.space(path.root);
  if (!space) return tl::unexpected(space.error());
  info.space = *space;
  for (const std::string& name : *names) {
    if (path.root + "/" + name == path.version_directory()) {
      info.has_store = true;
    } else if (version_of(name) > 0) {
      info.other_versions.push_back(version_of(name));
    }
  }
  std::ranges::sort(info.other_versions);
  if (info.has_store) TPUSYNC_TRY(view_version(files, path, info));
  return info;
}

}  // namespace tpusync::flash
