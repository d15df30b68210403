#include "tpusync/flash/slot_format.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

#include "tpusync/base/prng.h"
#include "tpusync/flash/ledger.h"

namespace tpusync::flash {
namespace {

using index::SlotId;

std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte b : bytes) text += fmt::format("{:02x}", std::to_integer<unsigned>(b));
  return text;
}

Digest digest_of(unsigned char first) {
  Digest digest;
  for (std::size_t i = 0; i < digest.size(); ++i) digest[i] = std::byte(first + i);
  return digest;
}

SlotRecord example_record() {
  SlotRecord record;
  for (std::size_t i = 0; i < index::kKeyBytes; ++i) record.key.bytes[i] = std::byte(0xa0 + i);
  record.ancestry = {.parent = 0x0000060504030201, .depth = 7};
  record.generation = 0x42;
  record.payload_checksum = 0x1122334455667788;
  record.length_bytes = 0x00080000;
  return record;
}

TableHeader example_header() {
  return {.version = 1,
          .name_space = digest_of(0),
          .page_bytes = 524288,
          .slot_bytes = 524288,
          .created_unix_ns = 1'700'000'000'000'000'000};
}

// The example bytes of docs/formats/flash-v1.md. A change here is a new format version.
TEST(SlotFormat, GoldenBytesOfVersion1) {
  EXPECT_EQ(hex(encode_header(example_header())),
            "54505553594e43540100000000100000000102030405060708090a0b0c0d0e0f"
            "101112131415161718191a1b1c1d1e1f00000800000000000000080000000000"
            "00002a36fe9c971740000000000000003315d57b64a438ee");
  EXPECT_EQ(hex(encode_record(example_record(), record_seed(digest_of(0)), SlotId{3})),
            "8394117700000800a0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7"
            "b8b9babbbcbdbebf887766554433221142000000000007000102030405060000");
  EXPECT_EQ(hex(encode_writer_mark({.process_id = 4242, .since_unix_ns = 1'700'000'000'000'000'000})),
            "54505553594e4357921000000000000000002a36fe9c9717943f7c915fc3c061");
  EXPECT_EQ(hex(encode_ledger(
                {.left_bytes = 1000, .updated_unix_ns = 1'700'000'000'000'000'000, .leased_bytes = 24})),
            "54505553594e434ce80300000000000000002a36fe9c97171800000000000000"
            "0000000000000000000000000000000000000000000000005be968a2c4443d9d");
}

TEST(SlotFormat, RecordsSurviveTheRoundTripAtTheirLimits) {
  SlotRecord record = example_record();
  record.generation = kGenerationMax;
  record.ancestry = {.parent = index::PageKey::kShortHashMask, .depth = 0xffff};
  record.length_bytes = 0xffffffff;
  record.flags = 0xffff;
  const auto decoded = decode_record(encode_record(record, 1, SlotId{0}), 1, SlotId{0});
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->key, record.key);
  EXPECT_EQ(decoded->generation, record.generation);
  EXPECT_EQ(decoded->ancestry.parent, record.ancestry.parent);
  EXPECT_EQ(decoded->ancestry.depth, record.ancestry.depth);
  EXPECT_EQ(decoded->length_bytes, record.length_bytes);
  EXPECT_EQ(decoded->payload_checksum, record.payload_checksum);
  EXPECT_EQ(decoded->flags, record.flags);
}

TEST(SlotFormat, RecordOfAnotherSlotOrNamespaceIsNone) {
  const std::uint64_t seed = record_seed(digest_of(0));
  const auto bytes = encode_record(example_record(), seed, SlotId{3});
  EXPECT_TRUE(decode_record(bytes, seed, SlotId{3}));
  EXPECT_FALSE(decode_record(bytes, seed, SlotId{4}));
  EXPECT_FALSE(decode_record(bytes, record_seed(digest_of(1)), SlotId{3}));
}

TEST(SlotFormat, EveryFlippedBitOfARecordIsNoticed) {
  auto bytes = encode_record(example_record(), 9, SlotId{3});
  for (std::size_t bit = 0; bit < kRecordBytes * 8; ++bit) {
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(decode_record(bytes, 9, SlotId{3})) << bit;
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

TEST(SlotFormat, EveryFlippedBitOfHeaderMarkAndLedgerIsNoticed) {
  auto header = encode_header(example_header());
  EXPECT_EQ(decode_header(header), example_header());
  for (std::size_t bit = 0; bit < kHeaderBytes * 8; ++bit) {
    header[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(decode_header(header)) << bit;
    header[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  const WriterMark mark{.process_id = 1, .since_unix_ns = 2};
  auto mark_bytes = encode_writer_mark(mark);
  EXPECT_EQ(decode_writer_mark(mark_bytes), mark);
  mark_bytes[9] ^= std::byte{1};
  EXPECT_FALSE(decode_writer_mark(mark_bytes));
  const Ledger ledger{.left_bytes = 3, .updated_unix_ns = 4, .leased_bytes = 5};
  auto ledger_bytes = encode_ledger(ledger);
  EXPECT_EQ(decode_ledger(ledger_bytes), ledger);
  for (std::size_t bit = 0; bit < kLedgerBytes * 8; ++bit) {
    ledger_bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(decode_ledger(ledger_bytes)) << bit;
    ledger_bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

TEST(SlotFormat, RandomBytesAreNoRecord) {
  base::Prng prng(5);
  std::array<std::byte, kRecordBytes> bytes;
  for (int i = 0; i < 10000; ++i) {
    prng.fill(bytes);
    EXPECT_FALSE(decode_record(bytes, 1, SlotId{0}));
  }
  bytes.fill(std::byte{0});
  EXPECT_TRUE(is_clear(bytes));
  EXPECT_FALSE(decode_record(bytes, 1, SlotId{0}));
}

TEST(SlotFormat, PayloadSeedDependsOnKeyAndGeneration) {
  const index::PageKey key = example_record().key;
  index::PageKey other = key;
  other.bytes[31] ^= std::byte{1};
  EXPECT_NE(payload_seed(key, 1), payload_seed(key, 2));
  EXPECT_NE(payload_seed(key, 1), payload_seed(other, 1));
}

}  // namespace
}  // namespace tpusync::flash
