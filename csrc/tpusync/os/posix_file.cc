#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <filesystem>

#include "tpusync/os/file.h"

namespace tpusync::os {

using base::Code;
using base::Result;
using base::Status;

namespace {

constexpr std::size_t kDirectAlignDefault = 4096;
constexpr std::uint64_t kStatBlockBytes = 512;
constexpr mode_t kFileMode = 0600;

tl::unexpected<base::Error> fail_path(const char* what, const std::string& path) {
  const int error_number = errno;
  if (error_number == ENOENT)
    return base::fail(Code::kNotFound, fmt::format("{} {}: no such file", what, path));
  return base::fail_errno(fmt::format("{} {}", what, path), error_number);
}

FileInfo info_of(const struct stat& status) {
  return {.is_directory = S_ISDIR(status.st_mode),
          .size_bytes = static_cast<std::uint64_t>(status.st_size),
          .disk_bytes = static_cast<std::uint64_t>(status.st_blocks) * kStatBlockBytes,
          .inode = status.st_ino,
          .owner = status.st_uid,
          .mode = status.st_mode & 07777,
          .modified_unix_ns = status.st_mtim.tv_sec * 1'000'000'000ll + status.st_mtim.tv_nsec};
}

// The alignment that direct transfers to this descriptor need, as the kernel says, if it does.
std::size_t direct_align_of(int descriptor) {
#ifdef STATX_DIOALIGN
  struct statx status;
  if (statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 &&
      (status.stx_mask & STATX_DIOALIGN) != 0) {
    const std::size_t align = std::max(status.stx_dio_mem_align, status.stx_dio_offset_align);
    if (align > 0 && align <= kDirectAlignDefault && (align & (align - 1)) == 0) return align;
  }
#endif
  return kDirectAlignDefault;
}

// Drops the first `num_bytes` of the pieces, which a short transfer has done.
void advance(std::vector<iovec>& pieces, std::size_t num_bytes) {
  std::size_t num_done = 0;
  while (num_done < pieces.size() && num_bytes >= pieces[num_done].iov_len)
    num_bytes -= pieces[num_done++].iov_len;
  pieces.erase(pieces.begin(), pieces.begin() + num_done);
  if (num_bytes == 0 || pieces.empty()) return;
  pieces.front().iov_base = static_cast<std::byte*>(pieces.front().iov_base) + num_bytes;
  pieces.front().iov_len -= num_bytes;
}

class PosixFile final : public File {
 public:
  PosixFile(int descriptor, std::string path, bool direct)
      : descriptor_(descriptor),
        path_(std::move(path)),
        direct_align_bytes_(direct ? direct_align_of(descriptor) : 1),
        direct_(direct) {}
  ~PosixFile() override { ::close(descriptor_); }

  Result<std::size_t> read(std::span<const iovec> pieces, std::uint64_t offset) const override {
    std::vector<iovec> left(pieces.begin(), pieces.end());
    std::size_t num_total = 0;
    while (!left.empty()) {
      const int num_pieces = static_cast<int>(std::min<std::size_t>(left.size(), IOV_MAX));
      const ssize_t num_read =
          ::preadv(descriptor_, left.data(), num_pieces, static_cast<off_t>(offset + num_total));
      if (num_read < 0 && errno == EINTR) continue;
      if (num_read < 0) return fail_path("read", path_);
      if (num_read == 0) break;
      num_total += static_cast<std::size_t>(num_read);
      advance(left, static_cast<std::size_t>(num_read));
    }
    return num_total;
  }

  Status write(std::span<const iovec> pieces, std::uint64_t offset) override {
    std::vector<iovec> left(pieces.begin(), pieces.end());
    while (!left.empty()) {
      const int num_pieces = static_cast<int>(std::min<std::size_t>(left.size(), IOV_MAX));
      const ssize_t num_written = ::pwritev(descriptor_, left.data(), num_pieces, static_cast<off_t>(offset));
      if (num_written < 0 && errno == EINTR) continue;
      if (num_written < 0) return fail_path("write", path_);
      if (num_written == 0) return base::fail_errno(fmt::format("write {}: nothing written", path_), EIO);
      offset += static_cast<std::uint64_t>(num_written);
      advance(left, static_cast<std::size_t>(num_written));
    }
    return {};
  }

  Status allocate(std::uint64_t size_bytes) override {
    if (::fallocate(descriptor_, 0, 0, static_cast<off_t>(size_bytes)) == 0) return {};
    if (errno != EOPNOTSUPP && errno != ENOSYS) return fail_path("allocate", path_);
    return truncate(size_bytes);
  }

  Status truncate(std::uint64_t size_bytes) override {
    if (::ftruncate(descriptor_, static_cast<off_t>(size_bytes)) != 0) return fail_path("truncate", path_);
    return {};
  }

  Status sync() override {
    if (::fdatasync(descriptor_) != 0) return fail_path("fdatasync", path_);
    return {};
  }

  Result<FileInfo> info() const override {
    struct stat status;
    if (::fstat(descriptor_, &status) != 0) return fail_path("stat", path_);
    return info_of(status);
  }

  Result<bool> try_lock() override {
    if (::flock(descriptor_, LOCK_EX | LOCK_NB) == 0) return true;
    if (errno == EWOULDBLOCK || errno == EINTR) return false;
    return fail_path("lock", path_);
  }
  void unlock() override { ::flock(descriptor_, LOCK_UN); }

  bool direct() const override { return direct_; }
  std::size_t direct_align_bytes() const override { return direct_align_bytes_; }
  int descriptor() const override { return descriptor_; }

 private:
  const int descriptor_;
  const std::string path_;
  const std::size_t direct_align_bytes_;
  const bool direct_;
};

class PosixFileSystem final : public FileSystem {
 public:
  Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode) override {
    const int flags = (mode.write ? O_RDWR : O_RDONLY) | (mode.create ? O_CREAT : 0) | O_CLOEXEC | O_NOFOLLOW;
    bool direct = mode.direct;
    int descriptor = ::open(path.c_str(), flags | (direct ? O_DIRECT : 0), kFileMode);
    if (descriptor < 0 && direct && errno == EINVAL) {
      direct = false;
      descriptor = ::open(path.c_str(), flags, kFileMode);
    }
    if (descriptor < 0) return fail_path("open", path);
    return std::make_unique<PosixFile>(descriptor, path, direct);
  }

  Result<FileInfo> info(const std::string& path) override {
    struct stat status;
    if (::lstat(path.c_str(), &status) != 0) return fail_path("stat", path);
    if (S_ISLNK(status.st_mode) && ::stat(path.c_str(), &status) != 0) return fail_path("stat", path);
    return info_of(status);
  }

  Result<std::vector<std::string>> list(const std::string& path) override {
    DIR* const directory = ::opendir(path.c_str());
    if (directory == nullptr) return fail_path("list", path);
    std::vector<std::string> names;
    while (const dirent* entry = ::readdir(directory)) {
      const std::string_view name = entry->d_name;
      if (name != "." && name != "..") names.emplace_back(name);
    }
    ::closedir(directory);
    std::sort(names.begin(), names.end());
    return names;
  }

  Status make_directory(const std::string& path, std::uint32_t mode) override {
    for (std::size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
      const std::string part = path.substr(0, end);
      if (::mkdir(part.c_str(), mode) != 0 && errno != EEXIST) return fail_path("make directory", part);
      if (end == std::string::npos) return {};
    }
  }

  Status remove(const std::string& path) override {
    if (::remove(path.c_str()) != 0) return fail_path("remove", path);
    return {};
  }

  Status rename(const std::string& from, const std::string& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) return fail_path("rename", from);
    return {};
  }

  Result<SpaceInfo> space(const std::string& path) override {
    struct statfs type;
    struct statvfs space;
    if (::statfs(path.c_str(), &type) != 0 || ::statvfs(path.c_str(), &space) != 0)
      return fail_path("statfs", path);
    const auto magic = static_cast<unsigned long>(type.f_type);
    return SpaceInfo{.total_bytes = std::uint64_t{space.f_blocks} * space.f_frsize,
                     .available_bytes = std::uint64_t{space.f_bavail} * space.f_frsize,
                     .in_memory = magic == TMPFS_MAGIC || magic == RAMFS_MAGIC,
                     .read_only = (space.f_flag & ST_RDONLY) != 0};
  }

  std::uint32_t user() const override { return ::geteuid(); }
};

}  // namespace

FileSystem& posix_file_system() {
  // Leaked on purpose: threads may open files while the process ends.
  static auto* const instance = new PosixFileSystem;
  return *instance;
}

}  // namespace tpusync::os
