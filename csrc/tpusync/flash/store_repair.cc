#include "tpusync/flash/store_repair.h"

#include <fmt/format.h>

#include <algorithm>

#include "tpusync/flash/region.h"
#include "tpusync/flash/store_lock.h"
#include "tpusync/flash/store_view.h"

namespace tpusync::flash {

using base::Code;
using base::Result;
using base::Status;
using Kind = Finding::Kind;

namespace {

constexpr std::chrono::seconds kPatience{10};

// The table of a region that nobody writes, for as long as the directory's lock is held.
struct OwnedTable {
  std::unique_ptr<StoreLock> lock;
  std::unique_ptr<os::File> file;
};

Result<OwnedTable> own_table(os::FileSystem& files, const StorePath& path, const std::string& base_path) {
  OwnedTable owned;
  auto lock = StoreLock::acquire(files, path, kPatience);
  if (!lock) return tl::unexpected(std::move(lock).error());
  owned.lock = std::move(*lock);
  const std::string table_path = base_path + std::string(kTableSuffix);
  auto file = files.open(table_path, {.write = true});
  if (!file) return tl::unexpected(std::move(file).error());
  owned.file = std::move(*file);
  TPUSYNC_TRY(lock_region(*owned.file, table_path));
  const auto head = read_table_head(*owned.file);
  if (!head) return tl::unexpected(head.error());
  if (!head->header || head->header->version <= kFormatVersion) return owned;
  return base::fail(Code::kUnsupported, fmt::format("{} has format version {}, this program knows {}",
                                                    table_path, head->header->version, kFormatVersion));
}

// False: the record says something else by now.
Result<bool> clear_if_same(os::File& table, const Finding& finding) {
  RecordBytes now{};
  const auto num_read = os::read_bytes(table, now, record_offset(finding.slot));
  if (!num_read) return tl::unexpected(num_read.error());
  if (*num_read < now.size() || now != finding.record) return false;
  TPUSYNC_TRY(os::write_bytes(table, RecordBytes{}, record_offset(finding.slot)));
  return true;
}

Result<bool> lengthen(os::FileSystem& files, os::File& table, const Repair& repair) {
  const auto slots = files.info(repair.base_path + std::string(kSlotsSuffix));
  const auto info = table.info();
  if (!slots) return tl::unexpected(slots.error());
  if (!info) return tl::unexpected(info.error());
  const std::uint64_t wanted = record_offset(slots->size_bytes / repair.header.slot_bytes);
  if (info->size_bytes >= wanted) return false;
  // A record that was cut in the middle describes nothing.
  if (info->size_bytes > kHeaderBlockBytes) {
    TPUSYNC_TRY(table.truncate(info->size_bytes - info->size_bytes % kRecordBytes));
  }
  TPUSYNC_TRY(table.truncate(wanted));
  return true;
}

Result<bool> settle(os::FileSystem& files, os::File& table, const Repair& repair, const Finding& finding,
                    std::int64_t now_unix_ns) {
  if (finding.kind == Kind::kShortTable) return lengthen(files, table, repair);
  if (finding.kind != Kind::kHeader) return clear_if_same(table, finding);
  TableHeader header = repair.header;
  header.created_unix_ns = now_unix_ns;
  TPUSYNC_TRY(os::write_bytes(table, encode_header(header), 0));
  return true;
}

// What is in the way may be gone already.
Status remove_if_there(os::FileSystem& files, const std::string& path) {
  Status removed = files.remove(path);
  if (!removed && removed.error().code == Code::kNotFound) return {};
  return removed;
}

void add_orphans(os::FileSystem& files, const std::string& directory, const NamespaceInfo& info,
                 std::vector<std::string>& orphans) {
  std::size_t num_regions = 0;
  for (const RegionInfo& region : info.regions) {
    const std::string base_path = directory + "/" + region.name;
    if (region.has_slots && !region.has_table) orphans.push_back(base_path + std::string(kSlotsSuffix));
    // One that cannot be looked into, or that is newer, is left alone.
    const bool is_newer = region.header && region.header->version > kFormatVersion;
    const bool is_dead = region.writer_state == WriterState::kNone && !is_newer;
    if (region.has_table && !region.has_slots && is_dead) {
      orphans.push_back(base_path + std::string(kTableSuffix));
    } else if (region.has_table) {
      ++num_regions;
    }
  }
  for (const std::string& name : info.temporaries) orphans.push_back(directory + "/" + name);
  if (num_regions > 0 || !info.strangers.empty()) return;
  const std::string identity = directory + "/" + std::string(kNamespaceFile);
  if (files.info(identity)) orphans.push_back(identity);
  orphans.push_back(directory);
}

}  // namespace

Result<std::size_t> repair_region(os::FileSystem& files, const StorePath& path, const Repair& repair,
                                  std::int64_t now_unix_ns) {
  const auto owned = own_table(files, path, repair.base_path);
  if (!owned) return tl::unexpected(owned.error());
  std::size_t num_settled = 0;
  for (const Finding& finding : repair.findings) {
    const auto settled = settle(files, *owned->file, repair, finding, now_unix_ns);
    if (!settled) return tl::unexpected(settled.error());
    num_settled += *settled;
  }
  TPUSYNC_TRY(owned->file->sync());
  return num_settled;
}

// Slots first: a crash in between leaves a table, which is adopted.
Status remove_region(os::FileSystem& files, const StorePath& path, const std::string& base_path) {
  const auto owned = own_table(files, path, base_path);
  if (!owned) return tl::unexpected(owned.error());
  TPUSYNC_TRY(remove_if_there(files, base_path + std::string(kSlotsSuffix)));
  return remove_if_there(files, base_path + std::string(kTableSuffix));
}

Result<std::vector<std::string>> remove_orphans(os::FileSystem& files, const StorePath& path, bool dry_run) {
  const auto lock = StoreLock::acquire(files, path, kPatience);
  if (!lock) return tl::unexpected(lock.error());
  const auto namespaces = view_namespaces(files, path, true);
  if (!namespaces) return tl::unexpected(namespaces.error());
  std::vector<std::string> orphans;
  for (const NamespaceInfo& info : *namespaces) {
    add_orphans(files, path.version_directory() + "/" + info.name, info, orphans);
  }
  for (std::size_t i = 0; !dry_run && i < orphans.size(); ++i)
    TPUSYNC_TRY(remove_if_there(files, orphans[i]));
  return orphans;
}

}  // namespace tpusync::flash
