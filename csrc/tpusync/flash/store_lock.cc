#include "tpusync/flash/store_lock.h"

#include <fmt/format.h>

#include <thread>

#include "tpusync/flash/region_reader.h"

namespace tpusync::flash {

using base::Code;
using base::Result;
using base::Status;

namespace {
constexpr std::chrono::milliseconds kPoll{1};
}  // namespace

Result<std::unique_ptr<StoreLock>> StoreLock::acquire(os::FileSystem& files, const StorePath& path,
                                                      std::chrono::milliseconds patience) {
  auto file = files.open(path.lock(), {.write = false});
  if (!file) return tl::unexpected(std::move(file).error());
  for (const auto until = std::chrono::steady_clock::now() + patience;;) {
    const auto locked = (*file)->try_lock();
    if (!locked) return tl::unexpected(locked.error());
    if (*locked) return std::unique_ptr<StoreLock>(new StoreLock(std::move(*file)));
    if (std::chrono::steady_clock::now() >= until) break;
    std::this_thread::sleep_for(kPoll);
  }
  return base::fail(Code::kBusy, fmt::format("{} stays locked by another process", path.lock()));
}

Status lock_region(os::File& table, const std::string& table_path) {
  const auto locked = table.try_lock();
  if (!locked) return tl::unexpected(locked.error());
  if (*locked) return {};
  const auto head = read_table_head(table);
  return base::fail(Code::kBusy, head && head->writer
                                     ? fmt::format("{} is being written by process {}", table_path,
                                                   head->writer->process_id)
                                     : fmt::format("{} is being written by another process", table_path));
}

}  // namespace tpusync::flash
