// What a store of many entries costs: store_scale DIRECTORY NUM_ENTRIES PAGE_BYTES. Writes a slot table of
// that many records beside a sparse slot file, opens the store, looks up. Prints one "name value" per line.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "tpusync/base/bytes.h"
#include "tpusync/base/prng.h"
#include "tpusync/flash/flash_store.h"
#include "tpusync/flash/region.h"

namespace {

using namespace tpusync;
using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kChainPages = 128;  // pages of one prefix
constexpr std::size_t kChunkRecords = 1 << 16;
constexpr int kNumLookups = 2001;

index::PageKey key_of(std::uint64_t number) {
  base::Prng prng(number + 1);
  index::PageKey key;
  for (std::size_t i = 0; i < key.bytes.size(); ++i) key.bytes[i] = static_cast<std::byte>(prng.below(256));
  return key;
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

std::uint64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

template <typename Value>
Value require(base::Result<Value> result) {
  if (!result) {
    fmt::print(stderr, "{}\n", result.error().message);
    std::exit(1);
  }
  return std::move(*result);
}

void require(const base::Status& status) {
  if (!status) {
    fmt::print(stderr, "{}\n", status.error().message);
    std::exit(1);
  }
}

// As a store would have left it after `num_entries` puts.
void write_table(const std::string& base_path, std::uint32_t num_entries, std::uint64_t page_bytes) {
  auto& files = os::posix_file_system();
  const auto table = require(files.open(base_path + std::string(flash::kTableSuffix), {}));
  const auto slots = require(files.open(base_path + std::string(flash::kSlotsSuffix), {}));
  require(slots->truncate(num_entries * base::round_up(page_bytes, flash::kSlotAlignBytes)));
  const std::uint64_t seed = flash::record_seed({});
  std::vector<std::byte> chunk;
  std::uint64_t begin = 0;
  index::PageKey parent;
  for (std::uint64_t i = 0; i < num_entries; ++i) {
    flash::SlotRecord record{.key = key_of(i),
                             .generation = i + 1,
                             .payload_checksum = i,
                             .length_bytes = static_cast<std::uint32_t>(page_bytes)};
    record.ancestry.depth = static_cast<std::uint16_t>(i % kChainPages);
    if (record.ancestry.depth > 0) record.ancestry.parent = parent.short_hash();
    parent = record.key;
    const auto bytes = flash::encode_record(record, seed, index::SlotId{static_cast<std::uint32_t>(i)});
    chunk.insert(chunk.end(), bytes.begin(), bytes.end());
    if (chunk.size() == kChunkRecords * flash::kRecordBytes || i + 1 == num_entries) {
      require(os::write_bytes(*table, chunk, flash::record_offset(begin)));
      begin = i + 1;
      chunk.clear();
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    fmt::print(stderr, "usage: store_scale DIRECTORY NUM_ENTRIES PAGE_BYTES\n");
    return 2;
  }
  const auto num_entries = static_cast<std::uint32_t>(std::strtoul(argv[2], nullptr, 10));
  flash::FlashOptions options;
  options.path = argv[1];
  options.namespace_json = "{}";
  options.page_bytes = std::strtoull(argv[3], nullptr, 10);
  options.floor_bytes = 0;
  options.housekeeping_period = std::chrono::milliseconds(0);
  options.extent_bytes = 1;
  options.capacity_bytes = require(os::posix_file_system().space("/")).total_bytes / 2;
  require(flash::FlashStore::open(options))->close();  // makes the directory and the headers
  write_table(fmt::format("{}/v1/{:032}/{}", options.path, 0, flash::region_name(0)), num_entries,
              options.page_bytes);

  const std::uint64_t before = resident_bytes();
  const auto begin = Clock::now();
  const auto store = require(flash::FlashStore::open(options));
  const double open_s = seconds_since(begin);
  const std::uint64_t after = resident_bytes();

  base::Prng prng(1);
  std::vector<double> lookups_us;
  for (int i = 0; i < kNumLookups; ++i) {
    const std::uint64_t first = prng.below(num_entries / kChainPages) * kChainPages;
    std::vector<index::PageKey> keys;
    for (std::uint64_t k = 0; k < kChainPages; ++k) keys.push_back(key_of(first + k));
    const auto start = Clock::now();
    const std::size_t found = store->match(keys, {});
    lookups_us.push_back(seconds_since(start) * 1e6);
    if (found != kChainPages) {
      fmt::print(stderr, "{} of {} keys found\n", found, kChainPages);
      return 1;
    }
  }
  std::sort(lookups_us.begin(), lookups_us.end());
  fmt::print("open_s {}\n", open_s);
  fmt::print("bytes_per_entry {}\n", double(after - before) / num_entries);
  fmt::print("lookup_us {}\n", lookups_us[lookups_us.size() / 2]);
  fmt::print("lookup_p99_us {}\n", lookups_us[lookups_us.size() * 99 / 100]);
  return 0;
}
