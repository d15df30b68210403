// The directory in which the processes of a node find each other's regions: file names, and nothing that
// runs.
//
//   <root>/<namespace, 64 hex digits>-<number>.region
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/host/region_format.h"

namespace tpusync::host {

// Immutable. Thread-safe.
class Registry {
 public:
  // Makes the directory with mode 0700 if it is missing. kInvalid: not a directory, another user's, or open
  // to others.
  static base::Result<Registry> open(const std::string& root);

  struct Entry {
    std::string path;
    Digest name_space{};
    int number = 0;
    std::uint64_t memory_bytes = 0;
    std::int64_t modified_unix_ns = 0;
  };
  // Sorted by name. Files with other names are none of our business.
  std::vector<Entry> entries() const;
  std::vector<Entry> entries_of(const Digest& name_space) const;

  std::string path_of(const Digest& name_space, int number) const;
  const std::string& root() const { return root_; }

  // Removes regions without a living writer, least recently written first, until `needed_bytes` are freed or
  // none is left; never `except`. Answers the bytes. Their readers keep what they have mapped.
  std::uint64_t remove_dead(std::uint64_t needed_bytes, const Digest* except) const;

  // Whether a process holds the region's lock at this moment.
  bool has_writer(const std::string& path) const;
  // Removes a region that has no living writer, whatever is in it.
  bool remove_if_dead(const std::string& path) const;

 private:
  explicit Registry(std::string root) : root_(std::move(root)) {}
  std::string root_;
};

}  // namespace tpusync::host
