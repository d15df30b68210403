#include "tpusync/testing/store_harness.h"

#include <stdlib.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "tpusync/base/log.h"
#include "tpusync/base/prng.h"

namespace tpusync::testing {

using base::Code;
using index::PageKey;

TempDirectory::TempDirectory() {
  std::string pattern = (std::filesystem::temp_directory_path() / "tpusync-XXXXXX").string();
  if (::mkdtemp(pattern.data()) != nullptr) path_ = pattern;
}

TempDirectory::~TempDirectory() {
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

LogCapture::LogCapture() {
  base::set_log_sink([this](base::LogLevel, std::string_view line) {
    std::lock_guard lock(mutex_);
    lines_.emplace_back(line);
  });
}

LogCapture::~LogCapture() {
  base::set_log_sink({});
}

std::size_t LogCapture::count(std::string_view text) const {
  std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(std::count_if(lines_.begin(), lines_.end(), [&](const std::string& line) {
    return line.find(text) != std::string::npos;
  }));
}

PageKey key_of(std::uint64_t number) {
  PageKey key;
  base::Prng(number * 0x5851f42d4c957f2dull + 11).fill(key.bytes);
  return key;
}

std::vector<PageKey> keys_of(std::span<const std::uint64_t> numbers) {
  std::vector<PageKey> keys;
  for (const std::uint64_t number : numbers) keys.push_back(key_of(number));
  return keys;
}

std::vector<std::uint64_t> range(std::uint64_t begin, std::uint64_t end) {
  std::vector<std::uint64_t> numbers;
  for (; begin < end; ++begin) numbers.push_back(begin);
  return numbers;
}

void fill_page(std::uint64_t number, std::span<std::byte> bytes) {
  base::Prng(~number).fill(bytes);
}

bool is_page(std::uint64_t number, std::span<const std::byte> bytes) {
  std::vector<std::byte> wanted(bytes.size());
  fill_page(number, wanted);
  return std::equal(bytes.begin(), bytes.end(), wanted.begin());
}

flash::FlashOptions small_options(const std::string& path, std::uint64_t page_bytes,
                                  std::uint64_t capacity_bytes) {
  flash::FlashOptions options;
  options.path = path;
  base::Prng(99).fill(options.name_space);
  options.namespace_json = "{\"model\": \"test\"}";
  options.page_bytes = page_bytes;
  options.capacity_bytes = capacity_bytes;
  options.floor_bytes = 0;
  options.write_budget_bytes_per_day = std::uint64_t{1} << 40;
  options.num_threads = 2;
  options.allow_tmpfs = true;
  options.extent_bytes = 16 * page_bytes;
  options.housekeeping_period = {};
  return options;
}

PageMemory::PageMemory(std::size_t num_pages, std::uint64_t page_bytes, std::size_t num_pieces,
                       std::size_t misalign_bytes)
    : page_bytes_(page_bytes),
      misalign_bytes_(misalign_bytes),
      buffer_(num_pages * page_bytes + misalign_bytes) {
  for (std::size_t piece = 0; piece < num_pieces; ++piece) {
    const std::uint64_t even = page_bytes / num_pieces;
    lengths_.push_back(piece + 1 < num_pieces ? even : page_bytes - even * (num_pieces - 1));
  }
  for (std::size_t i = 0; i < num_pages; ++i) {
    auto address = reinterpret_cast<std::uint64_t>(page(i).data());
    for (const std::uint64_t length : lengths_) {
      addresses_.push_back(address);
      address += length;
    }
  }
}

std::span<std::byte> PageMemory::page(std::size_t i) const {
  return buffer_.bytes().subspan(misalign_bytes_ + i * page_bytes_, page_bytes_);
}

std::vector<Code> StoreCalls::put(std::span<const std::uint64_t> numbers,
                                  std::span<const std::uint64_t> prefix) const {
  PageMemory memory(numbers.size(), page_bytes, num_pieces, misalign_bytes);
  for (std::size_t i = 0; i < numbers.size(); ++i) fill_page(numbers[i], memory.page(i));
  const auto keys = keys_of(numbers);
  const auto prefix_keys = keys_of(prefix);
  const auto batch = store.submit_put(
      {.keys = keys, .prefix = prefix_keys, .addresses = memory.addresses(), .lengths = memory.lengths()});
  if (!batch) return std::vector<Code>(numbers.size(), batch.error().code);
  batch->ticket.wait();
  return *batch->outcomes;
}

std::vector<Code> StoreCalls::get(std::span<const std::uint64_t> numbers,
                                  std::span<const std::uint64_t> prefix) const {
  PageMemory memory(numbers.size(), page_bytes, num_pieces, misalign_bytes);
  for (std::size_t i = 0; i < numbers.size(); ++i) fill_page(~numbers[i], memory.page(i));
  const auto keys = keys_of(numbers);
  const auto prefix_keys = keys_of(prefix);
  const auto batch = store.submit_get(
      {.keys = keys, .prefix = prefix_keys, .addresses = memory.addresses(), .lengths = memory.lengths()});
  if (!batch) return std::vector<Code>(numbers.size(), batch.error().code);
  batch->ticket.wait();
  std::vector<Code> outcomes = *batch->outcomes;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (outcomes[i] == Code::kOk && !is_page(numbers[i], memory.page(i))) outcomes[i] = Code::kUnsupported;
  }
  return outcomes;
}

bool StoreCalls::has(std::uint64_t number) const {
  const PageKey key = key_of(number);
  return store.contains({&key, 1}).front();
}

std::uint64_t StoreCalls::stat(std::string_view name) const {
  return metrics::value_of(store.stats(), name);
}

std::size_t count(const std::vector<Code>& outcomes, Code code) {
  return static_cast<std::size_t>(std::count(outcomes.begin(), outcomes.end(), code));
}

}  // namespace tpusync::testing
