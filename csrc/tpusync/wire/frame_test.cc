#include "tpusync/wire/frame.h"

#include <gtest/gtest.h>

#include <string>

#include "tpusync/wire/auth.h"

namespace tpusync::wire {
namespace {

using base::Code;

std::string hex(std::span<const std::byte> bytes) {
  std::string out;
  for (const std::byte b : bytes) {
    out += "0123456789abcdef"[static_cast<unsigned>(b) >> 4];
    out += "0123456789abcdef"[static_cast<unsigned>(b) & 15];
  }
  return out;
}

Head sample_head() {
  Head head;
  head.type = FrameType::kData;
  head.flags = kFlagChecksum;
  head.table_bytes = 48;
  head.payload_bytes = 0x20001;
  head.sequence = 7;
  head.generation = 0x1122334455667788;
  head.transfer = 9;
  head.checksum = 0xfedcba9876543210;
  return head;
}

DataTable sample_data() {
  return {0xa1a2a3a4a5a6a7a8, {{1, 0x20000, 0x30000}, {2, 1, 5}}};
}

template <typename T>
Bytes encoded(const T& table) {
  Bytes out;
  Writer writer(out);
  encode_table(table, writer);
  return out;
}

Bytes encoded_head(const Head& head) {
  Bytes out;
  Writer writer(out);
  encode_head(head, writer);
  return out;
}

TEST(Frame, HeadHasItsGoldenBytes) {
  EXPECT_EQ(
      hex(encoded_head(sample_head())),
      "545053310101000030000000010002000700000000000000887766554433221109000000000000001032547698badcfe");
}

TEST(Frame, TablesHaveTheirGoldenBytes) {
  EXPECT_EQ(hex(encoded(sample_data())),
            "a8a7a6a5a4a3a2a10200000000000000"
            "01000000000002000000030000000000"
            "02000000010000000500000000000000");
  EXPECT_EQ(hex(encoded(OfferTable{1, {{{2, 3, 4}, 5, 6}}})),
            "01000000000000000100000000000000"
            "02000000030000000400000000000000"
            "05000000000000000600000000000000");
  EXPECT_EQ(hex(encoded(ShareTable{3, 4096, 0x7f0000001000})),
            "020000000300000000100000000000000010000000"
            "7f0000");
  EXPECT_EQ(hex(encoded(RefuseTable{5, Code::kInvalid, "no"})), "0500000000000000086e6f");
}

TEST(Frame, TagHasItsGoldenBytes) {
  FrameKey key;
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::byte>(i);
  Bytes message;
  for (int i = 0; i < 15; ++i) message.push_back(static_cast<std::byte>(i));
  // The vector of 15 bytes published with SipHash-2-4-128.
  EXPECT_EQ(hex(make_tag(key, message)), "5493e99933b0a8117e08ec0f97cfc3d9");
}

TEST(Frame, DecodesWhatWasEncoded) {
  EXPECT_EQ(*decode_head(encoded_head(sample_head())), sample_head());
  EXPECT_EQ(*decode_data(encoded(sample_data())), sample_data());
  const OfferTable offer{1, {{{2, 3, 4}, 5, 6}, {{7, 8, 9}, 10, 11}}};
  EXPECT_EQ(*decode_offer(encoded(offer)), offer);
  const ShareTable share{3, 4096, 8192};
  EXPECT_EQ(*decode_share(encoded(share)), share);
  const RefuseTable refusal{5, Code::kCorrupt, "reason"};
  EXPECT_EQ(*decode_refuse(encoded(refusal)), refusal);
  Bytes ack;
  Writer writer(ack);
  encode_ack(42, writer);
  EXPECT_EQ(*decode_ack(ack), 42u);
}

TEST(Frame, RefusesEveryTruncation) {
  const Bytes head = encoded_head(sample_head());
  const Bytes data = encoded(sample_data());
  const Bytes offer = encoded(OfferTable{1, {{{2, 3, 4}, 5, 6}}});
  const Bytes share = encoded(ShareTable{3, 4096, 4096});
  for (std::size_t n = 0; n < head.size(); ++n) EXPECT_FALSE(decode_head(std::span(head).first(n)));
  for (std::size_t n = 0; n < data.size(); ++n) EXPECT_FALSE(decode_data(std::span(data).first(n)));
  for (std::size_t n = 0; n < offer.size(); ++n) EXPECT_FALSE(decode_offer(std::span(offer).first(n)));
  for (std::size_t n = 0; n < share.size(); ++n) EXPECT_FALSE(decode_share(std::span(share).first(n)));
}

TEST(Frame, RefusesWhatBreaksARule) {
  const auto broken = [](auto change) {
    Head head = sample_head();
    change(head);
    return !decode_head(encoded_head(head));
  };
  EXPECT_TRUE(broken([](Head& h) { h.type = static_cast<FrameType>(0); }));
  EXPECT_TRUE(broken([](Head& h) { h.type = static_cast<FrameType>(9); }));
  EXPECT_TRUE(broken([](Head& h) { h.flags = 2; }));
  EXPECT_TRUE(broken([](Head& h) { h.table_bytes = kTableBytesMax + 1; }));
  EXPECT_TRUE(broken([](Head& h) { h.payload_bytes = kPayloadBytesMax + 1; }));
  EXPECT_TRUE(broken([](Head& h) { h.payload_bytes = 0; }));
  EXPECT_TRUE(broken([](Head& h) { h.type = FrameType::kAck; }));
  EXPECT_FALSE(decode_data(encoded(DataTable{1, {}})));
  EXPECT_FALSE(decode_data(encoded(DataTable{1, {{1, 0, 5}}})));
  EXPECT_FALSE(decode_data(encoded(DataTable{1, {{1, 2, UINT64_MAX}}})));
  EXPECT_FALSE(
      decode_data(encoded(DataTable{1, std::vector<DataEntry>(kEntriesMax + 1, DataEntry{1, 1, 1})})));
  EXPECT_FALSE(decode_offer(encoded(OfferTable{1, {{{1, 2, 3}, 4, UINT64_MAX}}})));
  EXPECT_FALSE(decode_share(encoded(ShareTable{1, 4096, 0})));
  Bytes other_kind = encoded(ShareTable{1, 4096, 4096});
  other_kind[0] = std::byte{1};
  EXPECT_FALSE(decode_share(other_kind));
  EXPECT_FALSE(decode_share(encoded(ShareTable{1, 4096, UINT64_MAX})));
}

TEST(Frame, AReasonIsPrintableWhateverCame) {
  EXPECT_EQ(decode_refuse(encoded(RefuseTable{1, Code::kIo, "a\n\x1b[31m"}))->reason, "a??[31m");
}

}  // namespace
}  // namespace tpusync::wire
