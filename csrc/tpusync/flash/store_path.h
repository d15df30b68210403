// Whether a directory may hold a store, and where in it things lie.
//
//   <path>/v1/lock                     who holds its lock may adopt, grow and reclaim regions
//   <path>/v1/ledger                   the node's write budget
//   <path>/v1/want                     present while a region below its share waits for space
//   <path>/v1/<namespace>/             the first 32 hex digits of its digest
//       namespace.json                 its readable fields
//       region-NNN.slots, .table       one writer process each
#pragma once

#include <string>
#include <string_view>

#include "tpusync/base/error.h"
#include "tpusync/flash/slot_format.h"
#include "tpusync/os/file.h"

namespace tpusync::flash {

inline constexpr std::string_view kNamespaceFile = "namespace.json";

struct StorePath {
  std::string root;  // as configured

  std::string version_directory() const { return root + "/v1"; }
  std::string lock() const { return version_directory() + "/lock"; }
  std::string ledger() const { return version_directory() + "/ledger"; }
  std::string want() const { return version_directory() + "/want"; }
  std::string name_space(const Digest& digest) const;
};

// Makes what is missing, with mode 0700. kInvalid, with path, finding and remedy: not a directory, in memory
// (unless `allow_tmpfs`), read-only, of another user; kUnsupported: holds a newer format, and is left
// untouched.
base::Status prepare_store_path(os::FileSystem& files, const StorePath& path, bool allow_tmpfs);

// The N of a directory called vN; 0 for any other name.
unsigned version_of(std::string_view name);

// What du says of a file or of everything below a directory.
base::Result<std::uint64_t> disk_bytes_below(os::FileSystem& files, const std::string& path);

}  // namespace tpusync::flash
