// A network that cuts, stalls and lies: every request resolves, nothing wrong is acknowledged, and the next
// connection works.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "tpusync/testing/fault_proxy.h"
#include "tpusync/testing/raw_peer.h"
#include "tpusync/testing/transport_harness.h"
#include "tpusync/wire/auth.h"

namespace tpusync::transport {
namespace {

using base::Code;
using std::chrono::steady_clock;
using testing::expect_ok;
using testing::FaultProxy;
using testing::in_seconds;
using testing::RawPeer;
using testing::stat;
using testing::wait_stat;

// Handshake of a stream: what goes forth and back before the first frame.
constexpr std::uint64_t kForth = wire::kHelloBytes + wire::kProofBytes;
constexpr std::uint64_t kBack = wire::kChallengeBytes + wire::kProofBytes;

Options options(int num_streams = 1) {
  Options out;
  out.same_host = false;
  out.num_streams = num_streams;
  out.heartbeat_s = 0.1;
  out.silence_s = 20;
  out.handshake_s = 5;
  return out;
}

void expect_nothing_left(const testing::TransportPair& pair) {
  EXPECT_TRUE(wait_stat(*pair.reader, "num_streams", 0));
  EXPECT_TRUE(wait_stat(*pair.writer, "num_streams", 0));
  EXPECT_TRUE(wait_stat(*pair.reader, "num_peers", 0));
  EXPECT_TRUE(wait_stat(*pair.writer, "num_peers", 0));
  EXPECT_TRUE(wait_stat(*pair.reader, "num_handshakes", 0));
  EXPECT_TRUE(wait_stat(*pair.writer, "num_handshakes", 0));
}

// The connection is cut after so many bytes of one direction; afterwards all is as if it had never been.
void cut_at(testing::TransportPair& pair, FaultProxy& proxy, std::uint64_t bytes, bool is_forth) {
  const testing::Faults cut{.cut_after = bytes};
  proxy.set(is_forth ? cut : testing::Faults{}, is_forth ? testing::Faults{} : cut);
  std::memset(pair.target.data(), 0, pair.target.size());
  const auto connected = pair.writer->connect({proxy.address()}, in_seconds(20));
  if (connected) {
    const auto write =
        pair.writer->submit_write(*connected, pair.grant_all(), {pair.piece(0, 0, pair.source.size())}, {});
    if (write) {
      ASSERT_TRUE(write->wait(in_seconds(60))) << bytes;
      const bool all_arrived = write->status() && pair.source == pair.target;
      EXPECT_TRUE(all_arrived || !write->status()) << bytes;
    }
    [[maybe_unused]] const auto gone = pair.writer->disconnect(*connected);
  }
  expect_nothing_left(pair);
}

TEST(Fault, ACutAtEveryStateOfTheProtocolIsSurvived) {
  testing::TransportPair pair(options(), options(), 300 << 10);
  FaultProxy proxy(pair.reader->addresses()[0]);
  const std::uint64_t frame = wire::kHeadBytes + 32 + wire::kTagBytes;
  for (const std::uint64_t bytes :
       {std::uint64_t{0}, std::uint64_t{1}, wire::kHelloBytes - 1, wire::kHelloBytes, wire::kHelloBytes + 5,
        kForth - 1, kForth, kForth + 1, kForth + wire::kHeadBytes, kForth + frame - 1, kForth + frame,
        kForth + frame + 100000, kForth + frame + (256 << 10), kForth + 2 * frame + (256 << 10) + 7}) {
    cut_at(pair, proxy, bytes, true);
  }
  for (const std::uint64_t bytes :
       {std::uint64_t{0}, wire::kChallengeBytes - 1, wire::kChallengeBytes, kBack - 1, kBack, kBack + 1,
        kBack + wire::kHeadBytes, kBack + wire::kHeadBytes + 8 + wire::kTagBytes}) {
    cut_at(pair, proxy, bytes, false);
  }
  proxy.set({}, {});
  pair.connect({proxy.address()});
  expect_ok(pair.write_all());
  EXPECT_EQ(pair.source, pair.target);
}

TEST(Fault, AFlippedByteAnywhereIsNeverAcknowledged) {
  testing::TransportPair pair(options(), options(), 20 << 10);
  FaultProxy proxy(pair.reader->addresses()[0]);
  const std::uint64_t end = kForth + wire::kHeadBytes + 32 + wire::kTagBytes + pair.source.size();
  for (std::uint64_t at = 0; at < end; at += at < kForth + 150 ? 3 : 1999) {
    proxy.set({.flip_at = at}, {});
    const auto connected = pair.writer->connect({proxy.address()}, in_seconds(20));
    if (!connected) continue;
    std::memset(pair.target.data(), 0, pair.target.size());
    const auto write =
        pair.writer->submit_write(*connected, pair.grant_all(), {pair.piece(0, 0, pair.source.size())}, {});
    ASSERT_TRUE(write);
    ASSERT_TRUE(write->wait(in_seconds(60)));
    EXPECT_FALSE(write->status()) << at;
    [[maybe_unused]] const auto gone = pair.writer->disconnect(*connected);
  }
  EXPECT_GT(stat(*pair.reader, "frames_corrupt"), 0u);
  EXPECT_GT(stat(*pair.reader, "handshakes_refused") + stat(*pair.reader, "peers_lost"), 0u);
  expect_nothing_left(pair);
}

TEST(Fault, ASilentPeerIsLostInTimeOnBothSides) {
  Options brief = options(2);
  brief.silence_s = 2;
  testing::TransportPair pair(brief, brief, 64 << 20);
  FaultProxy proxy(pair.reader->addresses()[0]);
  pair.connect({proxy.address()});
  expect_ok(pair.write(pair.grant_all(), {pair.piece(0, 0, 100)}));
  proxy.partition(true);
  const auto begin = steady_clock::now();
  const exec::Ticket write = pair.write_all();
  ASSERT_TRUE(write.wait(in_seconds(60)));
  EXPECT_EQ(write.status().error().code, Code::kDisconnected);
  EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(10));
  EXPECT_TRUE(pair.writer->release_region(pair.source_region));
  expect_nothing_left(pair);
  EXPECT_GT(stat(*pair.reader, "peers_silent"), 0u);
  EXPECT_GT(stat(*pair.writer, "peers_silent"), 0u);
}

TEST(Fault, AnIdlePeerBehindASlowNetworkIsKept) {
  Options brief = options();
  brief.silence_s = 2;
  testing::TransportPair pair(brief, brief, 1 << 20);
  FaultProxy proxy(pair.reader->addresses()[0]);
  proxy.set({.delay = std::chrono::milliseconds(20)}, {.delay = std::chrono::milliseconds(20)});
  pair.connect({proxy.address()});
  // Nothing but heartbeats, for longer than the silence that would end it.
  EXPECT_TRUE(pair.reader->receive(1, in_seconds(4.5)).empty());
  expect_ok(pair.write_all());
  EXPECT_EQ(pair.source, pair.target);
}

TEST(Fault, AResetPeerIsLostAtOnceAndAnotherOneGoesOn) {
  testing::TransportPair pair(options(3), options(3), 8 << 20);
  FaultProxy proxy(pair.reader->addresses()[0]);
  pair.connect();  // directly
  const auto sick = pair.writer->connect({proxy.address()}, in_seconds(20));
  ASSERT_TRUE(sick);
  proxy.partition(true);
  const auto stuck = pair.writer->submit_write(*sick, pair.grant_all(), {pair.piece(0, 0, 8 << 20)}, {});
  ASSERT_TRUE(stuck);
  for (int i = 0; i < 20; ++i) expect_ok(pair.write_all());  // past the one that is stuck
  EXPECT_FALSE(stuck->done());
  const auto begin = steady_clock::now();
  proxy.reset_all();
  ASSERT_TRUE(stuck->wait(in_seconds(60)));
  EXPECT_EQ(stuck->status().error().code, Code::kDisconnected);
  EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(5));
  expect_ok(pair.write_all());
}

TEST(Fault, ARevocationNeedsNoWordOfAPeerThatStalls) {
  testing::TransportPair pair(options(), options(), 16 << 20);
  FaultProxy proxy(pair.reader->addresses()[0]);
  proxy.set({.delay = std::chrono::milliseconds(10)}, {});  // a quarter of a frame each time
  pair.connect({proxy.address()});
  const GrantId grant = pair.grant_all();
  const exec::Ticket write = pair.write(grant, {pair.piece(0, 0, 16 << 20)});
  while (proxy.bytes_forth() < (1 << 20)) std::this_thread::yield();
  proxy.partition(true);
  const exec::Ticket gone = pair.reader->revoke_grant(grant);
  ASSERT_TRUE(gone.wait(in_seconds(5)));  // silence would take twenty
  const std::vector<std::byte> after = pair.target;
  proxy.partition(false);
  ASSERT_TRUE(write.wait(in_seconds(60)));
  EXPECT_FALSE(write.status());
  EXPECT_EQ(pair.target, after);
}

TEST(Fault, WhoNeverAcknowledgesIsLost) {
  Options brief = options();
  brief.progress_s = 0.5;
  const auto endpoint = testing::open_endpoint(brief);
  RawPeer mute(endpoint->addresses()[0]);
  ASSERT_TRUE(mute.shake_hands({}));
  while (endpoint->peers().empty()) std::this_thread::yield();
  const auto message = endpoint->submit_message(endpoint->peers()[0].id, testing::random_bytes(10, 1));
  ASSERT_TRUE(message);
  // It goes on to ping, so it is not silent.
  for (const auto until = *in_seconds(20); !message->done() && steady_clock::now() < until;) {
    mute.send(mute.frame({}, {}));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  ASSERT_TRUE(message->done());
  EXPECT_EQ(message->status().error().code, Code::kDisconnected);
}

TEST(Fault, WhoReadsNothingDoesNotFillTheMemory) {
  Options brief = options();
  brief.inbox_messages_max = 1;
  const auto endpoint = testing::open_endpoint(brief);
  RawPeer greedy(endpoint->addresses()[0]);
  ASSERT_TRUE(greedy.shake_hands({}));
  // Every message but the first is refused, and no refusal is ever read: at some point nothing more is taken.
  wire::Head head;
  head.type = wire::FrameType::kMessage;
  const std::vector<std::byte> message(10);
  std::uint64_t num_sent = 0;
  while (num_sent < 2000000) {
    wire::Bytes batch;
    for (int i = 0; i < 1000; ++i) {
      const wire::Bytes one = greedy.frame(head, message);
      batch.insert(batch.end(), one.begin(), one.end());
    }
    if (!greedy.send(batch)) break;
    num_sent += 1000;
  }
  EXPECT_LT(num_sent, 2000000u);
}

TEST(Fault, AnAcknowledgementOfWhatWasNotSentEndsTheStream) {
  const auto endpoint = testing::open_endpoint(options());
  for (const auto type : {wire::FrameType::kAck, wire::FrameType::kRefuse}) {
    RawPeer liar(endpoint->addresses()[0]);
    ASSERT_TRUE(liar.shake_hands({}));
    wire::Bytes table;
    wire::Writer writer(table);
    if (type == wire::FrameType::kAck) wire::encode_ack(1000, writer);
    if (type == wire::FrameType::kRefuse)
      wire::encode_table(wire::RefuseTable{1000, Code::kIo, "no"}, writer);
    wire::Head head;
    head.type = type;
    ASSERT_TRUE(liar.send(liar.frame(head, table)));
    EXPECT_TRUE(liar.wait_closed());
  }
}

TEST(Fault, OffersAndSharesOverTcpAreRefused) {
  std::vector<std::byte> memory(4096);
  const auto endpoint = testing::open_endpoint(options());
  const RegionId region = *endpoint->register_region(memory.data(), memory.size());
  const GrantId grant = *endpoint->open_grant({{region, 0, 4096}}, std::nullopt);
  RawPeer peer(endpoint->addresses()[0]);
  ASSERT_TRUE(peer.shake_hands({}));
  wire::Bytes share;
  wire::Writer share_writer(share);
  wire::encode_table(wire::ShareTable{1, 4096, 4096}, share_writer);
  wire::Bytes offer;
  wire::Writer offer_writer(offer);
  wire::encode_table(wire::OfferTable{grant, {{{region, 100, 0}, 1, 0}}}, offer_writer);
  wire::Head head;
  head.type = wire::FrameType::kShare;
  ASSERT_TRUE(peer.send(peer.frame(head, share)));
  head.type = wire::FrameType::kOffer;
  ASSERT_TRUE(peer.send(peer.frame(head, offer)));
  EXPECT_TRUE(wait_stat(*endpoint, "frames_refused", 2));
}

}  // namespace
}  // namespace tpusync::transport
