// The lock of a store directory, for tools: nobody adopts, grows or reclaims a region while it is held.
#pragma once

#include <chrono>
#include <memory>

#include "tpusync/base/error.h"
#include "tpusync/flash/store_path.h"
#include "tpusync/os/file.h"

namespace tpusync::flash {

// A resource, to be held for moments: a server that starts waits for it, one that writes refuses pages.
class StoreLock {
 public:
  // kBusy when another process keeps it; kNotFound when there is no lock file, hence no store: none is made.
  static base::Result<std::unique_ptr<StoreLock>> acquire(os::FileSystem& files, const StorePath& path,
                                                          std::chrono::milliseconds patience);

 private:
  explicit StoreLock(std::unique_ptr<os::File> file) : file_(std::move(file)) {}

  const std::unique_ptr<os::File> file_;  // the lock goes with it
};

// The lock of a region whose table is `table`, held until the file is closed. kBusy, with the process named
// in the table, when a writer has it. The caller holds the directory's lock.
base::Status lock_region(os::File& table, const std::string& table_path);

}  // namespace tpusync::flash
