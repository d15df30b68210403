// What comes out of a socket, frame by frame: from somebody who knows the key and breaks every other rule.
#include "tpusync/transport/inbound.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstring>

#include "tpusync/base/checksum.h"
#include "tpusync/base/prng.h"
#include "tpusync/transport/socket.h"

namespace tpusync::transport {
namespace {

using base::Code;
using base::Status;

constexpr std::uint64_t kGeneration = 5;

// Lets data land through real grants and remembers what was said about it.
class Sink : public FrameSink {
 public:
  explicit Sink(GrantTable& grants) : grants_(grants) {}
  base::Result<Landing> on_data(std::span<const std::byte> table) override {
    const auto data = wire::decode_data(table);
    if (!data) return tl::unexpected(data.error());
    return grants_.land(data->grant, {}, data->entries);
  }
  Status on_landed(const wire::Head&, Status status) override {
    landed.push_back(std::move(status));
    return {};
  }
  Status on_control(const wire::Head& head, std::span<const std::byte>) override {
    controls.push_back(head.type);
    return {};
  }

  std::vector<Status> landed;
  std::vector<wire::FrameType> controls;

 private:
  GrantTable& grants_;
};

class InboundTest : public ::testing::Test {
 protected:
  InboundTest() {
    restart();
    grant_ = *grants_.open({{region_, 1024, 2048}}, std::nullopt);
  }

  void restart() {
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    here_ = Fd(ends[0]);
    there_ = Fd(ends[1]);
    inbound_ = std::make_unique<Inbound>(key_, kGeneration, need_checksum_, sink_);
    sequence_ = 0;
  }

  wire::Bytes frame(wire::Head head, std::span<const std::byte> table,
                    std::span<const std::byte> payload = {}) {
    wire::Bytes out;
    wire::Writer writer(out);
    wire::encode_head(head, writer);
    writer.bytes(table);
    writer.bytes(wire::make_tag(key_, out));
    writer.bytes(payload);
    return out;
  }

  wire::Head head(wire::FrameType type, std::size_t table_bytes, std::span<const std::byte> payload = {}) {
    wire::Head out;
    out.type = type;
    out.table_bytes = static_cast<std::uint32_t>(table_bytes);
    out.payload_bytes = static_cast<std::uint32_t>(payload.size());
    out.sequence = sequence_++;
    out.generation = kGeneration;
    if (!payload.empty()) {
      out.flags = wire::kFlagChecksum;
      out.checksum = base::checksum64(payload);
    }
    return out;
  }

  wire::Bytes table(std::vector<wire::DataEntry> entries) {
    wire::Bytes out;
    wire::Writer writer(out);
    wire::encode_table(wire::DataTable{grant_, std::move(entries)}, writer);
    return out;
  }

  // Sends in pieces of at most `step` and receives in between, to the end or the first error.
  Status feed(const wire::Bytes& bytes, std::size_t step = SIZE_MAX) {
    for (std::size_t at = 0; at < bytes.size();) {
      const std::size_t count = std::min({step, bytes.size() - at, std::size_t{65536}});
      EXPECT_EQ(::send(there_.get(), bytes.data() + at, count, 0), static_cast<ssize_t>(count));
      at += count;
      while (true) {
        const auto got = inbound_->receive(here_.get());
        if (!got) return tl::unexpected(got.error());
        if (*got == 0) break;
      }
    }
    return {};
  }

  const wire::FrameKey key_{std::byte{1}, std::byte{2}};
  std::vector<std::byte> memory_ = std::vector<std::byte>(4096);
  RegionTable regions_;
  const RegionId region_ = *regions_.add(memory_.data(), memory_.size());
  GrantTable grants_{regions_, 100};
  Sink sink_{grants_};
  GrantId grant_ = 0;
  Fd here_;
  Fd there_;
  std::unique_ptr<Inbound> inbound_;
  std::uint64_t sequence_ = 0;
  bool need_checksum_ = false;
};

TEST_F(InboundTest, LandsHoweverTheBytesAreCut) {
  std::vector<std::byte> payload(1500);
  base::Prng(3).fill(payload);
  for (const std::size_t step : {1, 7, 48, 64, 100, 1600, 100000}) {
    restart();
    std::memset(memory_.data(), 0, memory_.size());
    wire::Bytes all;
    for (int i = 0; i < 3; ++i) {
      const wire::Bytes entries = table({{region_, 1000, 2000}, {region_, 500, 1024}});
      const wire::Bytes one = frame(head(wire::FrameType::kData, entries.size(), payload), entries, payload);
      all.insert(all.end(), one.begin(), one.end());
      const wire::Bytes ping = frame(head(wire::FrameType::kPing, 0), {});
      all.insert(all.end(), ping.begin(), ping.end());
    }
    sink_.landed.clear();
    ASSERT_TRUE(feed(all, step));
    ASSERT_EQ(sink_.landed.size(), 3u);
    for (const Status& status : sink_.landed) EXPECT_TRUE(status);
    EXPECT_EQ(0, std::memcmp(memory_.data() + 2000, payload.data(), 1000));
    EXPECT_EQ(0, std::memcmp(memory_.data() + 1024, payload.data() + 1000, 500));
  }
}

TEST_F(InboundTest, AFlippedPayloadByteIsCorruptAndTheStreamGoesOn) {
  std::vector<std::byte> payload(100);
  const wire::Bytes entries = table({{region_, 100, 1024}});
  wire::Bytes bad = frame(head(wire::FrameType::kData, entries.size(), payload), entries, payload);
  bad[bad.size() - 50] ^= std::byte{4};
  ASSERT_TRUE(feed(bad));
  ASSERT_TRUE(feed(frame(head(wire::FrameType::kData, entries.size(), payload), entries, payload)));
  ASSERT_EQ(sink_.landed.size(), 2u);
  EXPECT_EQ(sink_.landed[0].error().code, Code::kCorrupt);
  EXPECT_TRUE(sink_.landed[1]);
}

TEST_F(InboundTest, PayloadWithoutAChecksumIsRefusedWhereOneIsWanted) {
  const std::vector<std::byte> payload(100, std::byte{9});
  const wire::Bytes entries = table({{region_, 100, 1024}});
  for (const bool needed : {true, false}) {
    need_checksum_ = needed;
    restart();
    wire::Head bare = head(wire::FrameType::kData, entries.size(), payload);
    bare.flags = 0;
    bare.checksum = 0;
    ASSERT_TRUE(feed(frame(bare, entries, payload)));
    ASSERT_FALSE(sink_.landed.empty());
    EXPECT_EQ(sink_.landed.back().has_value(), !needed);
    EXPECT_EQ(memory_[1024], needed ? std::byte{0} : std::byte{9});
  }
}

TEST_F(InboundTest, AFlippedByteOfHeadTableOrTagEndsTheStream) {
  std::vector<std::byte> payload(10);
  const wire::Bytes entries = table({{region_, 10, 1024}});
  const std::size_t signed_bytes = wire::kHeadBytes + entries.size() + wire::kTagBytes;
  for (std::size_t at = 0; at < signed_bytes; ++at) {
    restart();
    wire::Bytes bad = frame(head(wire::FrameType::kData, entries.size(), payload), entries, payload);
    bad[at] ^= std::byte{1};
    bad.resize(bad.size() + 70000);  // so that a larger table is all there
    const Status status = feed(bad);
    ASSERT_FALSE(status) << at;
    EXPECT_EQ(status.error().code, Code::kCorrupt) << at;
  }
  EXPECT_TRUE(sink_.landed.empty());
  for (const std::byte b : memory_) ASSERT_EQ(b, std::byte{0});
}

TEST_F(InboundTest, ARepeatedSkippedOrForeignFrameEndsTheStream) {
  const wire::Bytes ping = frame(head(wire::FrameType::kPing, 0), {});
  ASSERT_TRUE(feed(ping));
  EXPECT_EQ(feed(ping).error().code, Code::kCorrupt);  // replayed
  restart();
  ++sequence_;
  EXPECT_EQ(feed(frame(head(wire::FrameType::kPing, 0), {})).error().code, Code::kCorrupt);
  restart();
  wire::Head foreign = head(wire::FrameType::kPing, 0);
  foreign.generation = kGeneration + 1;
  EXPECT_EQ(feed(frame(foreign, {})).error().code, Code::kCorrupt);
}

TEST_F(InboundTest, ARevokedLandingTakesNoFurtherByte) {
  std::vector<std::byte> payload(1000, std::byte{9});
  const wire::Bytes entries = table({{region_, 1000, 1024}});
  const wire::Bytes whole = frame(head(wire::FrameType::kData, entries.size(), payload), entries, payload);
  const auto middle = whole.begin() + static_cast<std::ptrdiff_t>(whole.size() - 500);
  ASSERT_TRUE(feed(wire::Bytes(whole.begin(), middle)));
  const exec::Ticket gone = grants_.revoke(grant_);
  EXPECT_FALSE(gone.done());
  inbound_->drop_revoked();
  EXPECT_TRUE(gone.done());
  std::memset(memory_.data(), 0, memory_.size());
  ASSERT_TRUE(feed(wire::Bytes(middle, whole.end())));
  ASSERT_EQ(sink_.landed.size(), 1u);
  EXPECT_EQ(sink_.landed[0].error().code, Code::kCancelled);
  for (const std::byte b : memory_) ASSERT_EQ(b, std::byte{0});
}

TEST_F(InboundTest, FuzzedFramesWriteNothingOutsideTheGrant) {
  base::Prng prng(20261201);
  std::vector<std::byte> payload(3000);
  prng.fill(payload);
  int num_landed = 0;
  int num_ended = 0;
  for (int i = 0; i < 20000; ++i) {
    std::vector<wire::DataEntry> entries(1 + prng.below(3));
    std::size_t total = 0;
    for (wire::DataEntry& entry : entries) {
      entry.region = region_ + (prng.one_in(10) ? static_cast<RegionId>(prng.below(3)) : 0);
      entry.offset = prng.one_in(20) ? prng.next() : 900 + prng.below(2300);
      entry.length = static_cast<std::uint32_t>(prng.below(300));
      total += entry.length;
    }
    wire::Bytes encoded = table(entries);
    if (prng.one_in(5)) encoded[prng.below(encoded.size())] = static_cast<std::byte>(prng.next());
    if (prng.one_in(10)) encoded.resize(prng.below(200));
    const auto sent = std::span(payload).first(prng.one_in(10) ? prng.below(payload.size()) : total);
    wire::Head h = head(wire::FrameType::kData, encoded.size(), sent);
    if (prng.one_in(10)) h.type = static_cast<wire::FrameType>(prng.below(11));
    if (prng.one_in(10)) h.checksum = prng.next();
    wire::Bytes bytes = frame(h, encoded, sent);
    if (prng.one_in(10)) bytes[prng.below(bytes.size())] ^= static_cast<std::byte>(1 + prng.below(255));
    sink_.landed.clear();
    const Status status = feed(bytes, prng.one_in(3) ? 1 + prng.below(200) : SIZE_MAX);
    for (const Status& one : sink_.landed) num_landed += one.has_value();
    num_ended += !status;
    restart();
  }
  EXPECT_GT(num_landed, 1000);
  EXPECT_GT(num_ended, 1000);
  for (std::size_t at = 0; at < memory_.size(); ++at) {
    const bool granted = at >= 1024 && at < 3072;
    ASSERT_TRUE(granted || memory_[at] == std::byte{0}) << at;
  }
}

}  // namespace
}  // namespace tpusync::transport
