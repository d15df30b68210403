// What tests of a store share: pages whose bytes follow from their number, and short calls around batches.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tpusync/flash/flash_store.h"
#include "tpusync/os/aligned_buffer.h"

namespace tpusync::testing {

// A directory of its own on the real file system, removed at the end.
class TempDirectory {
 public:
  TempDirectory();
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;
  ~TempDirectory();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Keeps what is logged while it lives from standard error. One at a time.
class LogCapture {
 public:
  LogCapture();
  LogCapture(const LogCapture&) = delete;
  LogCapture& operator=(const LogCapture&) = delete;
  ~LogCapture();
  std::size_t count(std::string_view text) const;  // lines with this text in them

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

index::PageKey key_of(std::uint64_t number);
std::vector<index::PageKey> keys_of(std::span<const std::uint64_t> numbers);
std::vector<std::uint64_t> range(std::uint64_t begin, std::uint64_t end);

// Bytes that belong to a key: any mix-up of pages shows.
void fill_page(std::uint64_t number, std::span<std::byte> bytes);
bool is_page(std::uint64_t number, std::span<const std::byte> bytes);

// Small limits, no housekeeping thread, any directory.
flash::FlashOptions small_options(const std::string& path, std::uint64_t page_bytes = 4096,
                                  std::uint64_t capacity_bytes = 1 << 20);

// Memory for the pages of one batch. `misalign_bytes` moves it off its alignment; pages are cut into
// `num_pieces`.
class PageMemory {
 public:
  PageMemory(std::size_t num_pages, std::uint64_t page_bytes, std::size_t num_pieces = 1,
             std::size_t misalign_bytes = 0);
  std::span<std::byte> page(std::size_t i) const;
  std::span<const std::uint64_t> addresses() const { return addresses_; }
  std::span<const std::uint64_t> lengths() const { return lengths_; }

 private:
  const std::uint64_t page_bytes_;
  const std::size_t misalign_bytes_;
  os::AlignedBuffer buffer_;
  std::vector<std::uint64_t> addresses_;
  std::vector<std::uint64_t> lengths_;
};

struct StoreCalls {
  flash::FlashStore& store;
  std::uint64_t page_bytes;
  std::size_t num_pieces = 1;
  std::size_t misalign_bytes = 0;

  std::vector<base::Code> put(std::span<const std::uint64_t> numbers,
                              std::span<const std::uint64_t> prefix = {}) const;
  // Outcomes; kUnsupported in place of kOk where the bytes were wrong, which no store may ever answer.
  std::vector<base::Code> get(std::span<const std::uint64_t> numbers,
                              std::span<const std::uint64_t> prefix = {}) const;
  bool has(std::uint64_t number) const;  // index only
  std::uint64_t stat(std::string_view name) const;
};

std::size_t count(const std::vector<base::Code>& outcomes, base::Code code);

}  // namespace tpusync::testing
