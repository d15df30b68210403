// One suite for every way in which bytes travel: one stream, several, several threads, memory of one host.
#include "tpusync/transport/endpoint.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>

#include "tpusync/base/prng.h"
#include "tpusync/testing/transport_harness.h"

namespace tpusync::transport {
namespace {

using base::Code;
using testing::expect_error;
using testing::expect_ok;
using testing::in_seconds;
using testing::open_endpoint;
using testing::random_bytes;
using testing::stat;
using Pair = testing::TransportPair;
using std::chrono::steady_clock;

struct Way {
  const char* name;
  int num_streams;
  int num_io_threads;
  bool same_host;
  bool checksum;
};

void PrintTo(const Way& way, std::ostream* out) {
  *out << way.name;
}

Options options_of(const Way& way) {
  Options options;
  options.num_streams = way.num_streams;
  options.num_io_threads = way.num_io_threads;
  options.same_host = way.same_host;
  options.checksum = way.checksum;
  options.handshake_s = 10;
  options.silence_s = 20;  // sanitizers and busy machines are slow; silence has tests of its own
  options.progress_s = 20;
  return options;
}

class Transport : public ::testing::TestWithParam<Way> {
 protected:
  std::unique_ptr<Pair> pair(std::size_t length) {
    const Options options = options_of(GetParam());
    auto out = std::make_unique<Pair>(options, options, length);
    out->connect();
    return out;
  }
};

TEST_P(Transport, WritesArriveWhereTheyBelongAndNowhereElse) {
  auto p = pair(8 << 20);
  const GrantId grant = p->grant_all();
  base::Prng prng(7);
  std::vector<std::byte> expected = p->target;
  for (int round = 0; round < 20; ++round) {
    std::vector<Piece> pieces;
    std::size_t at = prng.below(1000);
    while (pieces.size() < 300) {
      const std::size_t length = 1 + prng.below(prng.one_in(20) ? 700000 : 5000);
      if (at + length > p->target.size()) break;
      const std::size_t from = prng.below(p->source.size() - length);
      pieces.push_back(p->piece(from, at, length));
      std::memcpy(expected.data() + at, p->source.data() + from, length);
      at += length + prng.below(3) * prng.below(5000);
    }
    expect_ok(p->write(grant, std::move(pieces)));
    ASSERT_EQ(p->target, expected) << "round " << round;
  }
}

TEST_P(Transport, ManyWritesAtOnceAllArrive) {
  auto p = pair(4 << 20);
  const GrantId grant = p->grant_all();
  std::vector<exec::Ticket> tickets;
  for (std::size_t at = 0; at < p->target.size(); at += 4096) {
    tickets.push_back(p->write(grant, {p->piece(at, p->target.size() - at - 4096, 4096)}));
  }
  for (const auto& ticket : tickets) expect_ok(ticket);
  for (std::size_t at = 0; at < p->target.size(); at += 4096) {
    ASSERT_EQ(0, std::memcmp(p->source.data() + at, p->target.data() + p->target.size() - at - 4096, 4096));
  }
}

TEST_P(Transport, BothSidesMayWrite) {
  auto p = pair(1 << 20);
  expect_ok(p->write(p->grant_all(), {p->piece(0, 0, 1 << 20)}));
  const auto peers = p->reader->peers();
  ASSERT_EQ(peers.size(), 1u);
  EXPECT_EQ(peers[0].endpoint, p->writer->id());
  const GrantId back = *p->writer->open_grant({{p->source_region, 0, 1 << 20}}, p->reader->id());
  base::Prng(99).fill(p->target);  // in place: the region stays where it is
  const auto ticket = p->reader->submit_write(
      peers[0].id, back, {{p->target.data(), p->source_region, 0, 1 << 20}}, in_seconds(60));
  ASSERT_TRUE(ticket);
  expect_ok(*ticket);
  EXPECT_EQ(p->source, p->target);
}

TEST_P(Transport, NothingIsWrittenOutsideTheGrant) {
  auto p = pair(64 << 10);
  const std::vector<std::byte> before = p->target;
  const GrantId grant = *p->reader->open_grant({{p->target_region, 4096, 4096}}, std::nullopt);
  expect_error(p->write(grant, {p->piece(0, 0, 4096)}), Code::kInvalid);
  expect_error(p->write(grant, {p->piece(0, 4096, 4097)}), Code::kInvalid);
  expect_error(p->write(grant, {p->piece(0, 4095, 1)}), Code::kInvalid);
  EXPECT_EQ(p->writer->submit_write(p->peer, grant, {p->piece(0, UINT64_MAX - 9, 10)}, {}).error().code,
            Code::kInvalid);
  expect_error(p->write(grant + 1, {p->piece(0, 4096, 1)}), Code::kNotFound);
  expect_error(p->write(grant, {{p->source.data(), p->target_region + 1, 4096, 1}}), Code::kInvalid);
  EXPECT_EQ(p->target, before);
  EXPECT_GE(stat(*p->reader, "frames_refused"), 5u);
  expect_ok(p->write(grant, {p->piece(0, 4096, 4096)}));  // and the peer is still there
}

TEST_P(Transport, AGrantIsItsHoldersOnly) {
  auto p = pair(4096);
  wire::EndpointId somebody = p->writer->id();
  somebody[0] ^= std::byte{1};
  const GrantId theirs = *p->reader->open_grant({{p->target_region, 0, 4096}}, somebody);
  expect_error(p->write(theirs, {p->piece(0, 0, 4096)}), Code::kNotFound);
  const GrantId ours = *p->reader->open_grant({{p->target_region, 0, 4096}}, p->writer->id());
  expect_ok(p->write(ours, {p->piece(0, 0, 4096)}));
}

TEST_P(Transport, NothingLandsAfterARevocation) {
  auto p = pair(32 << 20);
  for (int round = 0; round < 10; ++round) {
    const GrantId grant = p->grant_all();
    const exec::Ticket write = p->write(grant, {p->piece(0, 0, p->source.size())});
    const exec::Ticket gone = p->reader->revoke_grant(grant);
    ASSERT_TRUE(gone.wait(in_seconds(60)));
    std::memset(p->target.data(), 0, p->target.size());
    ASSERT_TRUE(write.wait(in_seconds(60)));
    for (const std::byte b : p->target) ASSERT_EQ(b, std::byte{0});
  }
  EXPECT_EQ(stat(*p->reader, "num_grants"), 0u);
  EXPECT_TRUE(p->reader->release_region(p->target_region));
}

TEST_P(Transport, ACancelledWriteResolvesAndLeavesTheMemoryAlone) {
  auto p = pair(64 << 20);
  const GrantId grant = p->grant_all();
  int num_cancelled = 0;
  for (int round = 0; round < 10; ++round) {
    const exec::Ticket write = p->write(grant, {p->piece(0, 0, p->source.size())});
    write.cancel();
    ASSERT_TRUE(write.wait(in_seconds(60)));
    num_cancelled += !write.status();
    EXPECT_TRUE(p->writer->release_region(p->source_region));  // nobody reads it any more
    const std::vector<std::byte> after = p->target;
    p->source_region = *p->writer->register_region(p->source.data(), p->source.size());
    expect_ok(p->write(grant, {p->piece(0, 0, 1)}));
    EXPECT_EQ(0, std::memcmp(after.data() + 1, p->target.data() + 1, after.size() - 1));
  }
  EXPECT_GT(num_cancelled, 0);
}

TEST_P(Transport, AWriteThatIsTooLateIsNotSent) {
  auto p = pair(4096);
  expect_error(p->write(p->grant_all(), {p->piece(0, 0, 4096)}, in_seconds(-1)), Code::kDeadline);
}

TEST_P(Transport, MessagesArrive) {
  auto p = pair(4096);
  std::vector<exec::Ticket> tickets;
  for (std::uint64_t i = 0; i < 100; ++i) {
    const auto ticket =
        p->writer->submit_message(p->peer, random_bytes(i == 50 ? wire::kMessageBytesMax : 1 + i, i));
    ASSERT_TRUE(ticket);
    tickets.push_back(*ticket);
  }
  std::vector<Event> events;
  while (events.size() < 100) {
    auto some = p->reader->receive(7, in_seconds(60));
    ASSERT_FALSE(some.empty());
    for (auto& event : some) events.push_back(std::move(event));
  }
  for (const auto& ticket : tickets) expect_ok(ticket);
  if (GetParam().num_streams > 1) return;
  for (std::uint64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(events[i].message, random_bytes(i == 50 ? wire::kMessageBytesMax : 1 + i, i));
  }
}

TEST_P(Transport, AFullInboxRefusesAndTheRestGoesOn) {
  Options options = options_of(GetParam());
  options.inbox_messages_max = 3;
  Pair p(options, options, 4096);
  p.connect();
  for (int i = 0; i < 5; ++i) {
    const auto ticket = p.writer->submit_message(p.peer, random_bytes(8, 1));
    ASSERT_TRUE(ticket);
    if (i < 3) expect_ok(*ticket);
    if (i >= 3) expect_error(*ticket, Code::kBusy);
  }
  expect_ok(p.write(p.grant_all(), {p.piece(0, 0, 4096)}));
}

TEST_P(Transport, ADisconnectCancelsWhatWaitsAndTellsTheOtherSide) {
  auto p = pair(64 << 20);
  const exec::Ticket write = p->write(p->grant_all(), {p->piece(0, 0, p->source.size())});
  ASSERT_TRUE(p->writer->disconnect(p->peer));
  ASSERT_TRUE(write.wait(in_seconds(60)));
  EXPECT_TRUE(p->writer->release_region(p->source_region));
  const auto events = p->reader->receive(10, in_seconds(60));
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, Event::Kind::kLost);
  EXPECT_EQ(p->writer->submit_write(p->peer, 1, {p->piece(0, 0, 1)}, {}).error().code, Code::kDisconnected);
  p->source_region = *p->writer->register_region(p->source.data(), p->source.size());
  p->connect();
  expect_ok(p->write(p->grant_all(), {p->piece(0, 0, 4096)}));
}

TEST_P(Transport, ClosingEitherSideResolvesEverything) {
  for (const bool close_reader : {false, true}) {
    auto p = pair(64 << 20);
    const exec::Ticket write = p->write(p->grant_all(), {p->piece(0, 0, p->source.size())});
    (close_reader ? p->reader : p->writer)->close();
    ASSERT_TRUE(write.wait(in_seconds(60)));
  }
}

TEST_P(Transport, AQueueHasItsLimit) {
  Options options = options_of(GetParam());
  options.queued_bytes_max = 1 << 20;
  options.rate_bytes_per_s_max = 4 << 20;
  Pair p(options, options, 8 << 20);
  p.connect();
  const GrantId grant = p.grant_all();
  const exec::Ticket first = p.write(grant, {p.piece(0, 0, 8 << 20)});  // one always passes
  const auto second = p.writer->submit_write(p.peer, grant, {p.piece(0, 0, 4096)}, {});
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, Code::kBusy);
  first.cancel();
  expect_error(first, Code::kCancelled);
}

TEST_P(Transport, PacingHoldsTheRate) {
  Options options = options_of(GetParam());
  options.frame_bytes = 16 << 10;
  options.rate_bytes_per_s_max = 8 << 20;
  Pair p(options, options, 4 << 20);
  p.connect();
  const auto begin = steady_clock::now();
  expect_ok(p.write(p.grant_all(), {p.piece(0, 0, 4 << 20)}));
  EXPECT_GT(steady_clock::now() - begin,
            std::chrono::milliseconds(300));  // 500 less the burst, less a margin
  EXPECT_EQ(p.source, p.target);
}

TEST_P(Transport, MemoryThatIsNotRegisteredIsRefused) {
  auto p = pair(4096);
  std::vector<std::byte> other(4096);
  EXPECT_EQ(p->writer->submit_write(p->peer, 1, {{other.data(), 1, 0, 4096}}, {}).error().code,
            Code::kInvalid);
  EXPECT_EQ(p->writer->submit_write(p->peer, 1, {{p->source.data() + 1, 1, 0, 4096}}, {}).error().code,
            Code::kInvalid);
  EXPECT_EQ(p->writer->submit_write(p->peer + 1, 1, {p->piece(0, 0, 1)}, {}).error().code,
            Code::kDisconnected);
  EXPECT_FALSE(p->writer->register_region(p->source.data() + 10, 10));
  EXPECT_EQ(p->reader->open_grant({{p->target_region, 1, 4096}}, {}).error().code, Code::kInvalid);
  EXPECT_EQ(p->reader->open_grant({{p->target_region, 0, 9}, {p->target_region, 8, 9}}, {}).error().code,
            Code::kInvalid);
}

TEST_P(Transport, TheFastWayOfOneHostIsTakenWhenItIsThere) {
  auto p = pair(8 << 20);
  const GrantId grant = p->grant_all();
  for (int i = 0; i < 3; ++i) expect_ok(p->write(grant, {p->piece(0, 0, p->source.size())}));
  EXPECT_EQ(p->source, p->target);
  EXPECT_EQ(stat(*p->reader, "fetched_bytes") > 0, GetParam().same_host);
}

INSTANTIATE_TEST_SUITE_P(Ways, Transport,
                         ::testing::Values(Way{"one_stream", 1, 1, false, true},
                                           Way{"four_streams", 4, 1, false, true},
                                           Way{"three_streams_two_threads", 3, 2, false, true},
                                           Way{"no_checksum", 2, 1, false, false},
                                           Way{"same_host", 4, 2, true, true}),
                         [](const auto& way) { return std::string(way.param.name); });

TEST(Endpoint, ConnectsOverIpv6) {
  Options options;
  options.bind = {"[::1]:0"};
  options.same_host = false;
  Pair p(options, options, 1 << 20);
  p.connect();
  expect_ok(p.write(p.grant_all(), {p.piece(0, 0, 1 << 20)}));
  EXPECT_EQ(p.source, p.target);
}

TEST(Endpoint, StreamsSpreadOverSeveralAddresses) {
  Options options;
  options.bind = {"127.0.0.1:0", "127.0.0.2:0"};
  options.source = {"127.0.0.1", "127.0.0.3"};
  options.same_host = false;
  Pair p(options, options, 1 << 20);
  ASSERT_EQ(p.reader->addresses().size(), 2u);
  p.connect();
  expect_ok(p.write(p.grant_all(), {p.piece(0, 0, 1 << 20)}));
}

TEST(Endpoint, AnAddressThatNobodyListensOnIsDisconnected) {
  std::string address;
  {
    const auto gone = open_endpoint(Options{});
    address = gone->addresses()[0];
  }
  const auto endpoint = open_endpoint(Options{});
  EXPECT_EQ(endpoint->connect({address}, in_seconds(5)).error().code, Code::kDisconnected);
  EXPECT_EQ(endpoint->connect({"localhost:1"}, in_seconds(5)).error().code, Code::kInvalid);
  EXPECT_EQ(endpoint->connect({"127.0.0.1:70000"}, in_seconds(5)).error().code, Code::kInvalid);
  EXPECT_EQ(endpoint->connect({}, in_seconds(5)).error().code, Code::kInvalid);
  EXPECT_EQ(stat(*endpoint, "num_peers"), 0u);
}

TEST(Endpoint, DoesNotConnectToItself) {
  const auto endpoint = open_endpoint(Options{});
  EXPECT_FALSE(endpoint->connect(endpoint->addresses(), in_seconds(5)));
}

TEST(Endpoint, NeedsASecretBeyondLoopback) {
  Options options;
  options.bind = {"0.0.0.0:0"};
  EXPECT_EQ(Endpoint::open(options).error().code, Code::kInvalid);
  options.allow_unauthenticated = true;
  EXPECT_TRUE(Endpoint::open(options));
  const auto endpoint = open_endpoint(Options{});
  EXPECT_EQ(endpoint->connect({"192.0.2.1:1"}, in_seconds(0.1)).error().code, Code::kInvalid);
}

TEST(Endpoint, OptionsOutOfTheirRangeAreRefusedByName) {
  Options options;
  options.num_streams = 0;
  EXPECT_NE(Endpoint::open(options).error().message.find("num_streams"), std::string::npos);
  options = {};
  options.silence_s = 0.1;
  EXPECT_NE(Endpoint::open(options).error().message.find("silence_s"), std::string::npos);
  options = {};
  options.secret_file = "/nonexistent/secret";
  EXPECT_NE(Endpoint::open(options).error().message.find("secret_file"), std::string::npos);
}

}  // namespace
}  // namespace tpusync::transport
