#include "tpusync/host/registry.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "tpusync/os/file.h"
#include "tpusync/os/shared_file.h"

namespace tpusync::host {

using base::Code;
using base::Result;

namespace {

constexpr std::string_view kSuffix = ".region";
constexpr std::uint32_t kDirectoryMode = 0700;
constexpr std::size_t kDigestDigits = 2 * kDigestBytes;

std::string hex_of(const Digest& digest) {
  std::string text;
  for (const std::byte byte : digest) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

std::optional<Registry::Entry> parse(std::string_view name) {
  if (!name.ends_with(kSuffix)) return std::nullopt;
  name.remove_suffix(kSuffix.size());
  if (name.size() <= kDigestDigits + 1 || name[kDigestDigits] != '-') return std::nullopt;
  Registry::Entry entry;
  for (std::size_t i = 0; i < kDigestBytes; ++i) {
    unsigned value = 0;
    const char* const at = name.data() + 2 * i;
    if (std::from_chars(at, at + 2, value, 16).ptr != at + 2) return std::nullopt;
    entry.name_space[i] = static_cast<std::byte>(value);
  }
  const char* const end = name.data() + name.size();
  const auto [parsed, error] = std::from_chars(name.data() + kDigestDigits + 1, end, entry.number);
  if (error != std::errc() || parsed != end || entry.number < 0) return std::nullopt;
  return entry;
}

}  // namespace

Result<Registry> Registry::open(const std::string& root) {
  if (!root.starts_with('/'))
    return base::fail(Code::kInvalid, fmt::format("{}: not an absolute path", root));
  os::FileSystem& files = os::posix_file_system();
  TPUSYNC_TRY(files.make_directory(root, kDirectoryMode));
  const Result<os::FileInfo> info = files.info(root);
  if (!info) return tl::unexpected(info.error());
  if (!info->is_directory) return base::fail(Code::kInvalid, fmt::format("{} is not a directory", root));
  if (info->owner != files.user()) {
    return base::fail(Code::kInvalid, fmt::format("{} belongs to user {}, this process runs as user {}", root,
                                                  info->owner, files.user()));
  }
  if ((info->mode & 077) != 0) {
    return base::fail(Code::kInvalid,
                      fmt::format("{} has mode {:o}: others could read the pages of every request, "
                                  "or put their own there; chmod it to 700",
                                  root, info->mode));
  }
  return Registry(root);
}

std::vector<Registry::Entry> Registry::entries() const {
  os::FileSystem& files = os::posix_file_system();
  std::vector<Entry> entries;
  const Result<std::vector<std::string>> names = files.list(root_);
  if (!names) return entries;
  for (const std::string& name : *names) {
    std::optional<Entry> entry = parse(name);
    if (!entry) continue;
    entry->path = root_ + "/" + name;
    const Result<os::FileInfo> info = files.info(entry->path);
    if (!info || info->is_directory) continue;
    entry->memory_bytes = info->disk_bytes;
    entry->modified_unix_ns = info->modified_unix_ns;
    entries.push_back(std::move(*entry));
  }
  return entries;
}

std::vector<Registry::Entry> Registry::entries_of(const Digest& name_space) const {
  std::vector<Entry> found = entries();
  std::erase_if(found, [&](const Entry& entry) { return entry.name_space != name_space; });
  std::sort(found.begin(), found.end(), [](const Entry& a, const Entry& b) { return a.number < b.number; });
  return found;
}

std::string Registry::path_of(const Digest& name_space, int number) const {
  return fmt::format("{}/{}-{}{}", root_, hex_of(name_space), number, kSuffix);
}

bool Registry::has_writer(const std::string& path) const {
  const auto file = os::SharedFile::open(path, os::SharedFile::Access::kWrite);
  return file && !(*file)->try_lock_writer().value_or(true);
}

bool Registry::remove_if_dead(const std::string& path) const {
  const auto file = os::SharedFile::open(path, os::SharedFile::Access::kWrite);
  return file && (*file)->try_lock_writer().value_or(false) && (*file)->remove_name();
}

std::uint64_t Registry::remove_dead(std::uint64_t needed_bytes, const Digest* except) const {
  std::vector<Entry> found = entries();
  std::sort(found.begin(), found.end(),
            [](const Entry& a, const Entry& b) { return a.modified_unix_ns < b.modified_unix_ns; });
  std::uint64_t freed_bytes = 0;
  for (const Entry& entry : found) {
    if (freed_bytes >= needed_bytes) break;
    if (except != nullptr && entry.name_space == *except) continue;
    if (remove_if_dead(entry.path)) freed_bytes += entry.memory_bytes;
  }
  return freed_bytes;
}

}  // namespace tpusync::host
