// What a fuzzer feeds to the decoders of this room: the blocks of a table and a ledger, and a whole table as
// the file of a region that a store opens. Aborts where a promise is broken; the sanitizers see to the rest.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>

#include "tpusync/base/checksum.h"
#include "tpusync/flash/flash_store.h"
#include "tpusync/flash/ledger.h"
#include "tpusync/flash/region.h"
#include "tpusync/testing/sim_disk.h"
#include "tpusync/testing/store_harness.h"

namespace tpusync::flash {

inline constexpr std::uint32_t kFuzzPageBytes = 4096;
inline constexpr std::uint32_t kFuzzSlots = 24;

inline void check_that(bool promise) {
  if (!promise) std::abort();
}

// The first bytes, zeros behind.
template <std::size_t N>
std::array<std::byte, N> block_of(std::span<const std::byte> data) {
  std::array<std::byte, N> block{};
  std::copy_n(data.begin(), std::min(N, data.size()), block.begin());
  return block;
}

// What is accepted is written again as it was.
inline void fuzz_blocks(std::span<const std::byte> data) {
  const auto record = block_of<kRecordBytes>(data);
  const std::uint64_t seed = record_seed({});
  const index::SlotId slot{static_cast<std::uint32_t>(data.size())};
  if (const auto decoded = decode_record(record, seed, slot)) {
    check_that(encode_record(*decoded, seed, slot) == record);
    check_that(!decode_record(record, seed, index::SlotId{index::to_number(slot) + 1}));
  }
  const auto header = block_of<kHeaderBytes>(data);
  if (const auto decoded = decode_header(header); decoded && decoded->version == kFormatVersion) {
    check_that(encode_header(*decoded) == header);
  }
  const auto mark = block_of<kWriterMarkBytes>(data);
  if (const auto decoded = decode_writer_mark(mark)) check_that(encode_writer_mark(*decoded) == mark);
  const auto ledger = block_of<kLedgerBytes>(data);
  if (const auto decoded = decode_ledger(ledger))
    check_that(decode_ledger(encode_ledger(*decoded)) == *decoded);
}

// `data` as the table of a region whose slots hold the pages 0, 1, 2, ...: whatever is served is right.
inline void fuzz_table(std::span<const std::byte> data) {
  const testing::LogCapture log;
  testing::SimDisk disk({.total_bytes = 1 << 22});
  auto options = testing::small_options("/store", kFuzzPageBytes, 1 << 20);
  options.name_space = {};
  if (!FlashStore::open(options, disk)) std::abort();
  const std::string base = "/store/v1/" + std::string(32, '0') + "/" + region_name(0);
  {
    const auto table = disk.open(base + std::string(kTableSuffix), {}).value();
    const auto slots = disk.open(base + std::string(kSlotsSuffix), {}).value();
    check_that(table->truncate(0) && os::write_bytes(*table, data, 0));
    check_that(slots->allocate(kFuzzSlots * kFuzzPageBytes).has_value());
    std::vector<std::byte> page(kFuzzPageBytes);
    for (std::uint32_t i = 0; i < kFuzzSlots; ++i) {
      testing::fill_page(i, page);
      check_that(os::write_bytes(*slots, page, i * kFuzzPageBytes).has_value());
    }
  }
  const auto store = FlashStore::open(options, disk);
  if (!store) return;  // refused: another namespace, page size or version
  check_that((*store)->consistent());
  const testing::StoreCalls calls{**store, kFuzzPageBytes};
  const auto numbers = testing::range(0, kFuzzSlots);
  check_that(testing::count(calls.get(numbers), base::Code::kUnsupported) == 0);
  calls.put(testing::range(100, 140));
  check_that(testing::count(calls.get(testing::range(100, 140)), base::Code::kUnsupported) == 0);
  check_that((*store)->consistent());
}

// Records that fuzzers do not find by themselves: checksums are made right where the first byte asks for it.
inline std::vector<std::byte> with_checksums(std::span<const std::byte> data) {
  std::vector<std::byte> table(data.begin(), data.end());
  const std::uint64_t seed = record_seed({});
  for (std::size_t at = kHeaderBlockBytes; at + kRecordBytes <= table.size(); at += kRecordBytes) {
    const std::uint64_t slot = (at - kHeaderBlockBytes) / kRecordBytes;
    const auto sum = static_cast<std::uint32_t>(
        base::checksum64(std::span(table).subspan(at + 4, kRecordBytes - 4), seed + slot));
    std::memcpy(table.data() + at, &sum, sizeof sum);
  }
  return table;
}

inline void fuzz_flash(std::span<const std::byte> data) {
  if (data.empty()) return;
  fuzz_blocks(data.subspan(1));
  if (std::to_integer<int>(data.front()) % 2 == 0) {
    fuzz_table(data.subspan(1));
  } else {
    fuzz_table(with_checksums(data.subspan(1)));
  }
}

// A table as a store writes it, of the pages that fuzz_table() puts into the slots.
inline std::vector<std::byte> fuzz_seed(std::byte kind) {
  std::vector<std::byte> seed(1 + kHeaderBlockBytes + kFuzzSlots * kRecordBytes);
  seed.front() = kind;
  const auto put = [&](std::span<const std::byte> bytes, std::size_t at) {
    std::copy(bytes.begin(), bytes.end(), seed.begin() + 1 + static_cast<std::ptrdiff_t>(at));
  };
  put(encode_header({.page_bytes = kFuzzPageBytes, .slot_bytes = kFuzzPageBytes}), 0);
  std::vector<std::byte> page(kFuzzPageBytes);
  for (std::uint32_t i = 0; i < kFuzzSlots; i += 2) {
    testing::fill_page(i, page);
    SlotRecord record{
        .key = testing::key_of(i), .ancestry = {}, .generation = i + 1, .length_bytes = kFuzzPageBytes};
    record.payload_checksum = base::checksum64(page, payload_seed(record.key, record.generation));
    put(encode_record(record, record_seed({}), index::SlotId{i}), record_offset(i));
  }
  return seed;
}

}  // namespace tpusync::flash
