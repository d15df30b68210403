#include "tpusync/host/region_format.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tpusync/base/bytes.h"
#include "tpusync/base/checksum.h"
#include "tpusync/host/testing.h"

namespace tpusync::host {
namespace {

using base::Code;
using index::SlotId;
using testing::digest_of;
using testing::key_of;

RegionHeader example_header() {
  return make_header({.piece_bytes = {65536, 65536}, .num_slots = 1000}, digest_of(7), 4096, 1234567890);
}

Seal example_seal() {
  return {.key = key_of(3),
          .ancestry = {.parent = key_of(2).short_hash(), .depth = 9},
          .generation = (std::uint64_t{5} << kGenerationCountBits) + 77,
          .payload_checksum = 0x0123456789abcdef,
          .length_bytes = 131072};
}

std::string hex_of(const SealWords& words) {
  std::string text;
  for (const std::byte byte : std::as_bytes(std::span(words)))
    text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

// The bytes of version 1, as docs/formats/region-v1.md shows the seal. A change here is a new version.
TEST(RegionFormat, GoldenBytes) {
  std::array<std::byte, kHeaderBytes> header{};
  encode_header(example_header(), header);
  EXPECT_EQ(base::checksum64(header), 0x144cfdcaf285309dull) << std::hex << base::checksum64(header);
  Digest digest;
  digest.fill(std::byte{7});
  Seal seal = example_seal();
  seal.key.bytes.fill(std::byte{0x11});
  seal.ancestry.parent = 0x222222222222;
  const SealWords words = encode_seal(seal, namespace_seed(digest), SlotId{12});
  EXPECT_EQ(hex_of(words),
            "9b000000000a00001111111111111111"
            "11111111111111111111111111111111"
            "1111111111111111efcdab8967452301"
            "2222222222220900000002004f81cab8");
  const auto state =
      encode_writer_state({.epoch = 5, .num_slots = 1000, .process_id = 4711, .since_unix_ns = 99});
  EXPECT_EQ(base::checksum64(state), 0x180217dbca11d50ull) << std::hex << base::checksum64(state);
}

TEST(RegionFormat, HeaderReadsBackAndEveryFlippedBitIsSeen) {
  std::array<std::byte, kHeaderBytes> bytes{};
  encode_header(example_header(), bytes);
  ASSERT_EQ(decode_header(bytes).value(), example_header());
  for (std::size_t i = 0; i < 1040; ++i) {
    bytes[i] ^= std::byte{1};
    // Between the fields there is room that means nothing yet.
    const bool reserved = i >= 104 && i < 1024;
    EXPECT_EQ(decode_header(bytes).has_value(), reserved) << i;
    bytes[i] ^= std::byte{1};
  }
}

TEST(RegionFormat, ANewerVersionIsSaidToBeOne) {
  std::array<std::byte, kHeaderBytes> bytes{};
  encode_header(example_header(), bytes);
  base::store_le<std::uint32_t>(bytes.data() + 8, kFormatVersion + 1);
  EXPECT_EQ(decode_header(bytes).error().code, Code::kUnsupported);
}

TEST(RegionFormat, AWholeHeaderWithImpossibleNumbersIsRefused) {
  for (auto spoil : std::vector<void (*)(RegionHeader&)>{
           [](RegionHeader& h) { h.payload_span_bytes = kSpanAlignBytes; },
           [](RegionHeader& h) { h.payload_span_bytes += 4096; },
           [](RegionHeader& h) { h.payload_span_bytes = ~std::uint64_t{0} << 21; },
           [](RegionHeader& h) { h.num_slots_max = 0; },
           [](RegionHeader& h) { h.num_slots_max = ~std::uint64_t{0}; },
           [](RegionHeader& h) { h.piece_bytes[0] = 0; },
           [](RegionHeader& h) { h.piece_bytes[1] = ~std::uint64_t{0}; }}) {
    RegionHeader header = example_header();
    spoil(header);
    std::array<std::byte, kHeaderBytes> bytes{};
    encode_header(header, bytes);
    EXPECT_EQ(decode_header(bytes).error().code, Code::kCorrupt);
  }
}

TEST(RegionFormat, SealReadsBackAndEveryFlippedBitIsSeen) {
  const std::uint64_t seed = namespace_seed(digest_of(7));
  SealWords words = encode_seal(example_seal(), seed, SlotId{12});
  ASSERT_EQ(decode_seal(words, seed, SlotId{12}).value(), example_seal());
  for (std::size_t bit = 0; bit < kSealBytes * 8; ++bit) {
    words[bit / 64] ^= std::uint64_t{1} << bit % 64;
    EXPECT_FALSE(decode_seal(words, seed, SlotId{12})) << bit;
    words[bit / 64] ^= std::uint64_t{1} << bit % 64;
  }
  EXPECT_FALSE(decode_seal(words, seed, SlotId{13}));
  EXPECT_FALSE(decode_seal(words, namespace_seed(digest_of(8)), SlotId{12}));
  EXPECT_FALSE(decode_seal(SealWords{}, seed, SlotId{12}));
}

TEST(RegionFormat, WriterStateReadsBackAndEveryFlippedBitIsSeen) {
  const WriterState state{.epoch = 5, .num_slots = 1000, .process_id = 4711, .since_unix_ns = 99};
  auto bytes = encode_writer_state(state);
  ASSERT_EQ(decode_writer_state(bytes).value(), state);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] ^= std::byte{4};
    EXPECT_FALSE(decode_writer_state(bytes)) << i;
    bytes[i] ^= std::byte{4};
  }
}

// Whatever the bytes are, decoding ends and answers something that keeps its promises.
TEST(RegionFormat, RandomBytesAreNeverTrusted) {
  base::Prng prng(11);
  for (int run = 0; run < 20000; ++run) {
    std::array<std::byte, kHeaderBytes> bytes{};
    encode_header(example_header(), bytes);
    for (std::uint64_t i = 0; i < 1 + prng.below(4); ++i) {
      bytes[prng.one_in(2) ? prng.below(104) : 1024 + prng.below(64)] = static_cast<std::byte>(prng.next());
    }
    if (prng.one_in(2)) {  // a forger who knows the checksum
      const std::uint32_t num_pieces = base::load_le<std::uint32_t>(bytes.data() + 12) % (kNumPiecesMax + 1);
      base::Checksum checksum(base::load_le<std::uint64_t>(bytes.data()));
      checksum.update(std::span(bytes).first(96));
      checksum.update(std::span(bytes).subspan(1024, num_pieces * 8));
      base::store_le<std::uint64_t>(bytes.data() + 96, checksum.value());
    }
    const auto header = decode_header(bytes);
    if (!header) continue;
    const Geometry geometry{header->piece_bytes, header->num_slots_max};
    EXPECT_LE(header->chain_offset(), header->table_span_bytes());
    if (!header->split) {
      EXPECT_LE(geometry.payload_bytes(), header->payload_span_bytes);
    }
    for (const std::uint64_t piece : header->piece_bytes) {
      EXPECT_LE(piece * header->num_slots_max, header->payload_span_bytes);
    }
  }
}

TEST(RegionFormat, OddPiecesShareOneSpanAndCannotBeResized) {
  const Geometry odd{.piece_bytes = {1000, 1000}, .num_slots = 7};
  const RegionHeader header = make_header(odd, digest_of(1), 4096, 0);
  EXPECT_FALSE(header.split);
  EXPECT_TRUE(fits(header, 7, 4096));
  EXPECT_FALSE(fits(header, 6, 4096));
  const RegionHeader one = make_header({.piece_bytes = {1000}, .num_slots = 7}, digest_of(1), 4096, 0);
  EXPECT_TRUE(one.split);
  EXPECT_TRUE(fits(one, 14, 4096));
  EXPECT_FALSE(fits(one, 15, 4096));
}

TEST(RegionFormat, GeometryNamesTheNumberThatIsOutOfItsRange) {
  EXPECT_TRUE(testing::small_geometry(1).validate());
  EXPECT_NE(testing::small_geometry(0).validate().error().message.find("num_slots: 0"), std::string::npos);
  EXPECT_FALSE((Geometry{.piece_bytes = {}, .num_slots = 1}.validate()));
  EXPECT_FALSE((Geometry{.piece_bytes = {0}, .num_slots = 1}.validate()));
  EXPECT_FALSE((Geometry{.piece_bytes = {kPageBytesMax, 1}, .num_slots = 1}.validate()));
  EXPECT_FALSE(
      (Geometry{.piece_bytes = std::vector<std::uint64_t>(kNumPiecesMax + 1, 1), .num_slots = 1}.validate()));
}

}  // namespace
}  // namespace tpusync::host
