// What a store directory holds, read by somebody who need not write it: for tools and metrics.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/flash/ledger.h"
#include "tpusync/flash/slot_format.h"
#include "tpusync/flash/store_path.h"
#include "tpusync/os/file.h"

namespace tpusync::flash {

// kUnknown: the table cannot be opened, or the directory stays locked.
enum class WriterState : unsigned char { kNone, kLive, kUnknown };

// A value: the files of one region.
struct RegionInfo {
  std::string name;  // region-000
  bool has_table = false;
  bool has_slots = false;
  std::optional<TableHeader> header{};  // nothing: damaged, or never written
  std::optional<WriterMark> writer{};   // who wrote last; of a live writer, who writes
  WriterState writer_state = WriterState::kNone;
  std::uint64_t table_bytes = 0;
  std::uint64_t slots_bytes = 0;
  std::uint64_t disk_bytes = 0;
  std::int64_t modified_unix_ns = 0;
  std::string trouble{};  // why the table cannot be looked into; empty
};

// A value: one directory below v1.
struct NamespaceInfo {
  std::string name;    // the first 32 hex digits of the digest
  std::string json{};  // its readable fields; empty if there are none
  std::vector<RegionInfo> regions{};
  std::vector<std::string>
      temporaries{};                     // left behind by a process that was killed while it replaced a file
  std::vector<std::string> strangers{};  // names that no store gives
};

// A value: a store directory.
struct StoreInfo {
  std::vector<unsigned> other_versions;  // N of the directories vN that this program leaves alone
  bool has_store = false;                // of this version
  std::vector<NamespaceInfo> namespaces;
  std::vector<std::string> strangers;
  os::SpaceInfo space;
  std::uint64_t used_bytes = 0;
  std::optional<Ledger> ledger;
  bool ledger_damaged = false;
  bool wants_space = false;  // a region below its share waits for it
};

// Looks at names, sizes, headers and locks, for moments with the directory's lock; writes nothing. What goes
// away meanwhile is left out. kNotFound: there is no such directory. kInvalid: it is none. kIo.
base::Result<StoreInfo> view_store(os::FileSystem& files, const StorePath& path);

// The part of it below v1. `lock_held`: the caller holds the directory's lock; without it, writers are
// unknown.
base::Result<std::vector<NamespaceInfo>> view_namespaces(os::FileSystem& files, const StorePath& path,
                                                         bool lock_held);

}  // namespace tpusync::flash
