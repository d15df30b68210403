// How a store is opened. Defaults are safe on a machine that does other work, too.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tpusync/base/bytes.h"
#include "tpusync/base/clock.h"
#include "tpusync/base/error.h"
#include "tpusync/flash/slot_format.h"

namespace tpusync::flash {

// When written pages are forced onto the medium. A SIGKILL loses nothing acknowledged in any of them; a power
// cut: kNone whatever the kernel had not yet written (checksums make it a miss), kInterval at most the last
// interval, kAlways nothing acknowledged.
enum class FsyncPolicy : unsigned char { kNone, kInterval, kAlways };

enum class IoKind : unsigned char {
  kAuto,      // the fastest one that works here
  kUring,     // io_uring, page cache bypassed
  kThreads,   // preadv/pwritev on threads, page cache bypassed
  kBuffered,  // preadv/pwritev on threads through the page cache
};

struct FlashOptions {
  std::string path;  // absolute
  Digest name_space{};
  std::string namespace_json;
  std::uint64_t page_bytes = 0;
  std::optional<std::uint64_t> capacity_bytes;              // of the whole directory
  std::optional<std::uint64_t> floor_bytes;                 // free space of the file system left to others
  std::optional<std::uint64_t> write_budget_bytes_per_day;  // of the whole directory
  FsyncPolicy fsync = FsyncPolicy::kNone;
  IoKind io = IoKind::kAuto;
  int num_threads = 0;  // for reading, and as many for writing; 0: as the IO engine likes it
  bool allow_tmpfs = false;
  // The caller's memory that most pages are in: stays mapped while the store is open. io_uring registers it,
  // which makes all of it present, unless the system's limit on locked memory forbids it.
  std::vector<std::span<std::byte>> memory;
  std::optional<std::chrono::seconds> ttl;         // since a page was written; after it the page is a miss
  std::chrono::milliseconds latency_budget{2000};  // of one transfer: a slower one counts as a failure

  std::uint64_t extent_bytes =
      64 * base::kMiB;  // files grow by this much, or by an eighth of a small capacity
  std::chrono::milliseconds housekeeping_period{1000};  // 0: only when housekeep() is called
  const base::Clock* clock = nullptr;                   // outlives the store; null: the real one

  // kInvalid with the first rule that is broken and its numbers.
  base::Status validate() const;
};

}  // namespace tpusync::flash
