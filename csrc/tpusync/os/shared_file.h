// A file that lives in memory (tmpfs, hugetlbfs) and that processes of one node map: one writer, many
// readers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tpusync/base/error.h"

namespace tpusync::os {

// A resource. Thread-safe. Its locks belong to this open file: they go with it, and with its process.
class SharedFile {
 public:
  enum class Access : unsigned char { kRead, kWrite, kCreate };

  struct Info {
    std::uint64_t size_bytes = 0;
    std::uint64_t memory_bytes = 0;  // what is really allocated
    std::uint64_t inode = 0;
    std::uint32_t owner = 0;
    std::uint64_t map_align_bytes = 4096;  // offsets and sizes of mappings are multiples of it
  };

  // kNotFound: there is no such file. kBusy: to be created, and there already. kInvalid: not a regular file,
  // or another user's, with both users named. Symbolic links are not followed; the mode of a new file is
  // 0600.
  static base::Result<std::unique_ptr<SharedFile>> open(const std::string& path, Access access);

  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;
  ~SharedFile();

  // Becomes the one writer, without waiting; false: somebody else is, or the path now names another file.
  base::Result<bool> try_lock_writer();
  // Says that this process reads mappings of the file, so that nobody takes memory out of it.
  base::Status enter_readers();
  base::Result<bool> has_readers() const;

  base::Result<Info> info() const;
  base::Status set_size(std::uint64_t size_bytes);
  // Gives the memory of a range back to the system; the range then reads as zeros.
  base::Status release(std::uint64_t offset, std::uint64_t size_bytes);

  // Whether the path still names this file.
  bool named() const;
  base::Status remove_name();

  const std::string& path() const { return path_; }
  int descriptor() const { return descriptor_; }

 private:
  SharedFile(int descriptor, std::string path) : descriptor_(descriptor), path_(std::move(path)) {}

  const int descriptor_;
  const std::string path_;
};

}  // namespace tpusync::os
