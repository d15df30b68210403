// Memory that shows ranges of a file, one behind the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "tpusync/base/error.h"
#include "tpusync/os/shared_file.h"

namespace tpusync::os {

// A resource. Immutable; what lies in the memory is between its writer and its readers.
class Mapping {
 public:
  struct Range {
    std::uint64_t file_offset = 0;
    std::uint64_t size_bytes = 0;
  };

  // Every range but the last is a multiple of the file's map_align_bytes, as are all offsets. kInvalid when a
  // range is not, or ends beyond the end of the file. The mapping outlives the file's descriptor.
  static base::Result<std::unique_ptr<Mapping>> open(const SharedFile& file, std::span<const Range> ranges,
                                                     bool write);

  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  std::span<std::byte> bytes() const { return bytes_; }

  // Places memory that is not yet there on this NUMA node if it has room. kUnsupported without NUMA.
  base::Status prefer_node(int node) const;

  // Makes [offset, offset + size) present and mapped, so that touching it can neither fail nor fault:
  // kExhausted when there is no memory for it. Thread-safe.
  base::Status populate(std::uint64_t offset, std::uint64_t size_bytes) const;

 private:
  Mapping(std::span<std::byte> bytes, std::span<std::byte> reserved, bool write)
      : bytes_(bytes), reserved_(reserved), write_(write) {}

  const std::span<std::byte> bytes_;
  const std::span<std::byte> reserved_;
  const bool write_;
};

}  // namespace tpusync::os
