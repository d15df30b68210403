// The seam to the operating system's files: all that the flash tier asks of one, so that a fake can be put
// there.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tpusync/base/error.h"

namespace tpusync::os {

struct FileInfo {
  bool is_directory = false;
  std::uint64_t size_bytes = 0;
  std::uint64_t disk_bytes = 0;  // what it occupies, as du counts it
  std::uint64_t inode = 0;
  std::uint32_t owner = 0;
  std::uint32_t mode = 0;  // permission bits
  std::int64_t modified_unix_ns = 0;
};

struct SpaceInfo {
  std::uint64_t total_bytes = 0;
  std::uint64_t available_bytes = 0;  // to an unprivileged process
  bool in_memory = false;             // tmpfs or ramfs
  bool read_only = false;
};

// An open file. Thread-safe: positions are arguments. Errors are kIo, kExhausted when the disk is full.
class File {
 public:
  virtual ~File() = default;

  // Fills the pieces from `offset` on; answers the bytes read, fewer only at the end of the file.
  virtual base::Result<std::size_t> read(std::span<const iovec> pieces, std::uint64_t offset) const = 0;
  // Writes all of the pieces or answers an error.
  virtual base::Status write(std::span<const iovec> pieces, std::uint64_t offset) = 0;
  // Makes the file at least `size_bytes` long with the space reserved where the file system can do that.
  virtual base::Status allocate(std::uint64_t size_bytes) = 0;
  virtual base::Status truncate(std::uint64_t size_bytes) = 0;
  // On the medium when it returns.
  virtual base::Status sync() = 0;
  virtual base::Result<FileInfo> info() const = 0;

  // Takes the file's lock for this open file, without waiting; false: somebody else has it. It goes with the
  // File.
  virtual base::Result<bool> try_lock() = 0;
  virtual void unlock() = 0;

  // True: transfers bypass the page cache, and memory, offset and length must be aligned to
  // direct_align_bytes.
  virtual bool direct() const { return false; }
  virtual std::size_t direct_align_bytes() const { return 1; }
  // The descriptor for engines that submit by themselves; -1 if there is none.
  virtual int descriptor() const { return -1; }
};

struct OpenMode {
  bool write = true;
  bool create = false;
  bool direct = false;  // a wish: see File::direct
};

// Thread-safe. Paths are absolute. A missing file is kNotFound.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual base::Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode) = 0;
  virtual base::Result<FileInfo> info(const std::string& path) = 0;
  virtual base::Result<std::vector<std::string>> list(const std::string& path) = 0;  // names, sorted
  // With all missing parents; those and the directory itself get `mode`. Present is fine.
  virtual base::Status make_directory(const std::string& path, std::uint32_t mode) = 0;
  virtual base::Status remove(const std::string& path) = 0;  // a file or an empty directory
  virtual base::Status rename(const std::string& from, const std::string& to) = 0;
  virtual base::Result<SpaceInfo> space(const std::string& path) = 0;
  virtual std::uint32_t user() const = 0;  // the effective user of this process
};

// The real one, with no state of its own.
FileSystem& posix_file_system();

// One contiguous piece.
base::Result<std::size_t> read_bytes(const File& file, std::span<std::byte> bytes, std::uint64_t offset);
base::Status write_bytes(File& file, std::span<const std::byte> bytes, std::uint64_t offset);

// A whole small file; at most `limit_bytes` of it.
base::Result<std::string> read_text(FileSystem& files, const std::string& path, std::size_t limit_bytes);
// By way of a temporary name, so that `path` has the old or the new text at any moment.
base::Status replace_text(FileSystem& files, const std::string& path, std::string_view text);
inline constexpr std::string_view kTemporarySuffix = ".tmp";

}  // namespace tpusync::os
