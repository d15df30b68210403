#include "tpusync/os/shared_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>

namespace tpusync::os {

using base::Code;
using base::Result;
using base::Status;

namespace {

constexpr mode_t kFileMode = 0600;
constexpr std::uint64_t kStatBlockBytes = 512;
constexpr long kHugetlbfsMagic = 0x958458f6;

// Readers share this byte of the file's lock space; writers hold flock(2), which does not collide with it.
struct flock readers_byte(short type) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = 0;
  lock.l_len = 1;
  return lock;
}

tl::unexpected<base::Error> fail_path(const char* what, const std::string& path) {
  const int error_number = errno;
  if (error_number == ENOENT)
    return base::fail(Code::kNotFound, fmt::format("{} {}: no such file", what, path));
  if (error_number == EEXIST) return base::fail(Code::kBusy, fmt::format("{} {}: it exists", what, path));
  return base::fail_errno(fmt::format("{} {}", what, path), error_number);
}

Status check_kind(int descriptor, const std::string& path) {
  struct stat status;
  if (::fstat(descriptor, &status) != 0) return fail_path("stat", path);
  if (!S_ISREG(status.st_mode))
    return base::fail(Code::kInvalid, fmt::format("{} is not a regular file", path));
  if (status.st_uid == ::geteuid()) return {};
  return base::fail(Code::kInvalid, fmt::format("{} belongs to user {}, this process runs as user {}", path,
                                                status.st_uid, ::geteuid()));
}

}  // namespace

Result<std::unique_ptr<SharedFile>> SharedFile::open(const std::string& path, Access access) {
  int flags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  flags |= access == Access::kRead ? O_RDONLY : O_RDWR;
  if (access == Access::kCreate) flags |= O_CREAT | O_EXCL;
  const int descriptor = ::open(path.c_str(), flags, kFileMode);
  if (descriptor < 0) return fail_path("open", path);
  std::unique_ptr<SharedFile> file(new SharedFile(descriptor, path));
  TPUSYNC_TRY(check_kind(descriptor, path));
  return file;
}

SharedFile::~SharedFile() {
  ::close(descriptor_);
}

Result<bool> SharedFile::try_lock_writer() {
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) == 0) {
    // The name may have gone to another file between open and lock.
    if (named()) return true;
    ::flock(descriptor_, LOCK_UN);
    return false;
  }
  if (errno == EWOULDBLOCK || errno == EINTR) return false;
  return fail_path("lock", path_);
}

Status SharedFile::enter_readers() {
  struct flock lock = readers_byte(F_RDLCK);
  if (::fcntl(descriptor_, F_OFD_SETLK, &lock) != 0) return fail_path("lock for reading", path_);
  return {};
}

Result<bool> SharedFile::has_readers() const {
  struct flock lock = readers_byte(F_WRLCK);
  if (::fcntl(descriptor_, F_OFD_GETLK, &lock) != 0) return fail_path("look for readers of", path_);
  return lock.l_type != F_UNLCK;
}

Result<SharedFile::Info> SharedFile::info() const {
  struct stat status;
  struct statfs space;
  if (::fstat(descriptor_, &status) != 0 || ::fstatfs(descriptor_, &space) != 0)
    return fail_path("stat", path_);
  Info info{.size_bytes = static_cast<std::uint64_t>(status.st_size),
            .memory_bytes = static_cast<std::uint64_t>(status.st_blocks) * kStatBlockBytes,
            .inode = status.st_ino,
            .owner = status.st_uid};
  if (space.f_type == kHugetlbfsMagic) info.map_align_bytes = static_cast<std::uint64_t>(space.f_bsize);
  return info;
}

Status SharedFile::set_size(std::uint64_t size_bytes) {
  if (::ftruncate(descriptor_, static_cast<off_t>(size_bytes)) != 0) return fail_path("resize", path_);
  return {};
}

Status SharedFile::release(std::uint64_t offset, std::uint64_t size_bytes) {
  if (size_bytes == 0) return {};
  if (::fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(size_bytes)) != 0) {
    return fail_path("release memory of", path_);
  }
  return {};
}

bool SharedFile::named() const {
  struct stat mine;
  struct stat there;
  if (::fstat(descriptor_, &mine) != 0 || ::lstat(path_.c_str(), &there) != 0) return false;
  return mine.st_ino == there.st_ino && mine.st_dev == there.st_dev;
}

Status SharedFile::remove_name() {
  if (::unlink(path_.c_str()) != 0) return fail_path("remove", path_);
  return {};
}

}  // namespace tpusync::os
