#include "tpusync/flash/store_path.h"

#include <fmt/format.h>

#include <charconv>

namespace tpusync::flash {

using base::Code;
using base::Status;

namespace {

constexpr std::uint32_t kDirectoryMode = 0700;
constexpr std::size_t kNumNameBytes = 16;

Status check_owner(os::FileSystem& files, const std::string& path) {
  const auto info = files.info(path);
  if (!info) return tl::unexpected(info.error());
  if (!info->is_directory)
    return base::fail(Code::kInvalid, fmt::format("path: {} is not a directory", path));
  if (info->owner != files.user()) {
    return base::fail(Code::kInvalid,
                      fmt::format("path: {} belongs to user {}, this process is user {}; choose another "
                                  "path or change its owner",
                                  path, info->owner, files.user()));
  }
  return {};
}

Status check_space(os::FileSystem& files, const std::string& path, bool allow_tmpfs) {
  const auto space = files.space(path);
  if (!space) return tl::unexpected(space.error());
  if (space->in_memory && !allow_tmpfs) {
    return base::fail(Code::kInvalid,
                      fmt::format("path: {} lies in memory (tmpfs or ramfs); choose a disk, or set "
                                  "allow_tmpfs",
                                  path));
  }
  if (space->read_only) {
    return base::fail(Code::kInvalid, fmt::format("path: {} is on a file system mounted read-only", path));
  }
  return {};
}

Status check_version(os::FileSystem& files, const std::string& path) {
  const auto names = files.list(path);
  if (!names) return tl::unexpected(names.error());
  for (const std::string& name : *names) {
    if (version_of(name) <= kFormatVersion) continue;
    return base::fail(Code::kUnsupported,
                      fmt::format("{} holds a store of format version {}, this program knows {}; "
                                  "choose another path",
                                  path, version_of(name), kFormatVersion));
  }
  return {};
}

}  // namespace

unsigned version_of(std::string_view name) {
  unsigned version = 0;
  if (name.size() < 2 || name[0] != 'v') return 0;
  const char* const end = name.data() + name.size();
  const auto parsed = std::from_chars(name.data() + 1, end, version);
  return parsed.ec == std::errc() && parsed.ptr == end ? version : 0;
}

base::Result<std::uint64_t> disk_bytes_below(os::FileSystem& files, const std::string& path) {
  const auto info = files.info(path);
  if (!info) {
    // It may have been removed since it was listed.
    if (info.error().code == Code::kNotFound) return std::uint64_t{0};
    return tl::unexpected(info.error());
  }
  std::uint64_t total = info->disk_bytes;
  if (!info->is_directory) return total;
  const auto names = files.list(path);
  if (!names) return tl::unexpected(names.error());
  for (const std::string& name : *names) {
    const auto below = disk_bytes_below(files, path + "/" + name);
    if (!below) return below;
    total += *below;
  }
  return total;
}

std::string StorePath::name_space(const Digest& digest) const {
  std::string path = version_directory() + "/";
  for (std::size_t i = 0; i < kNumNameBytes; ++i)
    path += fmt::format("{:02x}", std::to_integer<unsigned>(digest[i]));
  return path;
}

Status prepare_store_path(os::FileSystem& files, const StorePath& path, bool allow_tmpfs) {
  const auto info = files.info(path.root);
  if (!info && info.error().code != Code::kNotFound) {
    return base::fail(Code::kInvalid, fmt::format("path: {}", info.error().message));
  }
  if (!info) {
    if (Status made = files.make_directory(path.root, kDirectoryMode); !made) {
      return base::fail(Code::kInvalid, fmt::format("path: {}", made.error().message));
    }
  }
  TPUSYNC_TRY(check_owner(files, path.root));
  TPUSYNC_TRY(check_space(files, path.root, allow_tmpfs));
  TPUSYNC_TRY(check_version(files, path.root));
  if (Status made = files.make_directory(path.version_directory(), kDirectoryMode); !made) {
    return base::fail(Code::kInvalid,
                      fmt::format("path: {} cannot be written: {}", path.root, made.error().message));
  }
  return check_owner(files, path.version_directory());
}

}  // namespace tpusync::flash
