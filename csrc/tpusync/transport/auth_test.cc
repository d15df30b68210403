// Who may speak to an endpoint, and what happens to those who may not.
#include "tpusync/wire/auth.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <thread>
#include <utility>

#include "tpusync/base/prng.h"
#include "tpusync/testing/raw_peer.h"
#include "tpusync/testing/transport_harness.h"
#include "tpusync/transport/endpoint.h"
#include "tpusync/transport/secret.h"

namespace tpusync::transport {
namespace {

using base::Code;
using testing::expect_error;
using testing::expect_ok;
using testing::in_seconds;
using testing::open_endpoint;
using testing::random_bytes;
using testing::RawPeer;
using testing::stat;
using testing::wait_stat;

class SecretFile {
 public:
  explicit SecretFile(const std::string& text) {
    char name[] = "/tmp/tpusync-secret-XXXXXX";
    const Fd fd(::mkstemp(name));
    path = name;
    std::ofstream(path) << text;
  }
  ~SecretFile() { ::unlink(path.c_str()); }
  std::string path;
};

class Auth : public ::testing::Test {
 protected:
  Options options(const SecretFile* file, bool same_host = false) const {
    Options out;
    if (file != nullptr) out.secret_file = file->path;
    out.same_host = same_host;
    out.num_streams = 2;
    out.silence_s = 20;
    return out;
  }
  wire::Bytes hello(std::uint64_t generation = 7) const {
    wire::Hello hello;
    hello.generation = generation;
    wire::fill_random(hello.nonce);
    wire::Bytes out;
    wire::Writer writer(out);
    wire::encode_hello(hello, writer);
    return out;
  }
  // Nothing is left of whoever was refused, and who knows the secret is still served.
  void expect_healthy(testing::TransportPair& pair) const {
    EXPECT_TRUE(wait_stat(*pair.reader, "num_handshakes", 0));
    pair.connect();
    expect_ok(pair.write_all());
    EXPECT_EQ(pair.source, pair.target);
  }

  const SecretFile good_{"correct horse battery staple\n"};
  const SecretFile bad_{"wrong horse battery staple\n"};
  const Secret secret_ = *read_secret(good_.path);
  const Secret wrong_ = *read_secret(bad_.path);
};

TEST_F(Auth, TheSecretIsReadAndItsFileChecked) {
  EXPECT_EQ(read_secret(good_.path)->size(), 28u);  // without the line's end
  EXPECT_EQ(read_secret(SecretFile("short").path).error().code, Code::kInvalid);
  EXPECT_EQ(read_secret(SecretFile(std::string(5000, 'x')).path).error().code, Code::kInvalid);
  EXPECT_EQ(read_secret("/nonexistent").error().code, Code::kInvalid);
  EXPECT_EQ(read_secret("/tmp").error().code, Code::kInvalid);
  const std::string pipe = good_.path + "-pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(read_secret(pipe).error().code, Code::kInvalid);
  ::unlink(pipe.c_str());
  const SecretFile open_to_all("a secret that anybody may write");
  ::chmod(open_to_all.path.c_str(), 0666);
  EXPECT_EQ(read_secret(open_to_all.path).error().code, Code::kInvalid);
}

TEST_F(Auth, TheSameSecretOpensEveryWay) {
  for (const bool same_host : {false, true}) {
    testing::TransportPair pair(options(&good_, same_host), options(&good_, same_host), 1 << 20);
    pair.connect();
    expect_ok(pair.write_all());
    EXPECT_EQ(pair.source, pair.target);
  }
}

TEST_F(Auth, AnotherSecretOrNoneIsRefusedOnEitherSide) {
  const std::vector<std::byte> zeros(4096);
  for (const bool same_host : {false, true}) {
    using Files = std::pair<const SecretFile*, const SecretFile*>;
    for (const auto& [ours, theirs] :
         {Files(&good_, &bad_), Files(&good_, nullptr), Files(nullptr, &good_)}) {
      testing::TransportPair pair(options(ours, same_host), options(theirs, same_host), 4096);
      const auto peer = pair.writer->connect(pair.reader->addresses(), in_seconds(20));
      ASSERT_FALSE(peer);
      EXPECT_EQ(stat(*pair.writer, "num_peers"), 0u);
      EXPECT_TRUE(wait_stat(*pair.reader, "num_streams", 0));
      EXPECT_GT(stat(*pair.reader, "handshakes_refused"), 0u);
      EXPECT_EQ(pair.target, zeros);
    }
  }
}

TEST_F(Auth, ATruncatedHandshakeEndsInTime) {
  Options brief = options(&good_);
  brief.handshake_s = 1;
  testing::TransportPair pair(options(&good_), brief, 4096);
  for (const std::size_t sent : {std::size_t{0}, std::size_t{1}, wire::kHelloBytes - 1, wire::kHelloBytes}) {
    RawPeer stranger(pair.reader->addresses()[0]);
    const wire::Bytes word = hello();
    ASSERT_TRUE(stranger.send(std::span(word).first(sent)));
    EXPECT_TRUE(stranger.wait_closed()) << sent;
  }
  expect_healthy(pair);
}

TEST_F(Auth, AReplayedHandshakeIsRefused) {
  testing::TransportPair pair(options(&good_), options(&good_), 4096);
  // What an honest initiator said, word for word.
  RawPeer honest(pair.reader->addresses()[0]);
  wire::Hello first;
  first.generation = 99;
  wire::fill_random(first.initiator);
  wire::Bytes said;
  Handshake machine = Handshake::initiate(secret_, first, said);
  ASSERT_TRUE(honest.send(said));
  wire::Bytes proof;
  ASSERT_TRUE(machine.advance(honest.receive(wire::kChallengeBytes), proof));
  ASSERT_TRUE(honest.send(proof));
  ASSERT_EQ(honest.receive(wire::kProofBytes).size(), wire::kProofBytes);

  RawPeer replay(pair.reader->addresses()[0]);
  ASSERT_TRUE(replay.send(said));
  EXPECT_EQ(replay.receive(wire::kChallengeBytes).size(), wire::kChallengeBytes);
  ASSERT_TRUE(replay.send(proof));
  EXPECT_TRUE(replay.receive(1).empty());  // closed without a word
  expect_healthy(pair);
}

TEST_F(Auth, AReflectedProofIsRefused) {
  testing::TransportPair pair(options(&good_), options(&good_), 4096);
  // Two connections: the answer to one is tried on the other, and on itself.
  RawPeer one(pair.reader->addresses()[0]);
  RawPeer two(pair.reader->addresses()[0]);
  const wire::Bytes word = hello();
  ASSERT_TRUE(one.send(word));
  ASSERT_TRUE(two.send(word));
  const auto challenge = one.receive(wire::kChallengeBytes);
  ASSERT_EQ(two.receive(wire::kChallengeBytes).size(), wire::kChallengeBytes);
  wire::Transcript transcript(word);
  transcript.insert(transcript.end(), challenge.begin(), challenge.end());
  // The acceptor's own proof, as if somebody had got hold of it.
  ASSERT_TRUE(one.send(wire::make_proof(secret_, wire::Role::kAcceptor, transcript)));
  EXPECT_TRUE(one.receive(1).empty());
  // The initiator's proof, of the other connection.
  ASSERT_TRUE(two.send(wire::make_proof(secret_, wire::Role::kInitiator, transcript)));
  EXPECT_TRUE(two.receive(1).empty());
  expect_healthy(pair);
}

TEST_F(Auth, AnAcceptorThatDoesNotKnowTheSecretIsRefused) {
  // An endpoint dials somebody who answers, but cannot prove himself.
  auto listener = listen_on(*Address::parse("127.0.0.1:0"));
  ASSERT_TRUE(listener);
  const std::string address = Address::of(listener->get())->text();
  std::jthread impostor([&] {
    base::Result<Fd> accepted = accept_from(listener->get());
    while (!accepted) accepted = accept_from(listener->get());
    const Fd fd = *std::move(accepted);
    Handshake machine = Handshake::accept(wrong_, {});
    wire::Bytes heard(wire::kHelloBytes), said;
    for (std::size_t have = 0; have < heard.size();) {
      const ssize_t got = ::recv(fd.get(), heard.data() + have, heard.size() - have, 0);
      if (got > 0) have += static_cast<std::size_t>(got);
    }
    ASSERT_TRUE(machine.advance(heard, said));
    const wire::Proof guess{};
    said.insert(said.end(), guess.begin(), guess.end());
    ::send(fd.get(), said.data(), said.size(), MSG_NOSIGNAL);
  });
  Options one = options(&good_);
  one.num_streams = 1;
  const auto endpoint = open_endpoint(one);
  const auto peer = endpoint->connect({address}, in_seconds(20));
  ASSERT_FALSE(peer);
  EXPECT_EQ(peer.error().code, Code::kInvalid) << peer.error().message;
}

TEST_F(Auth, StrangersDoNotFillTheHouse) {
  Options few = options(&good_);
  few.num_handshakes_max = 4;
  few.handshake_s = 1;
  testing::TransportPair pair(options(&good_), few, 4096);
  std::vector<RawPeer> strangers;
  for (int i = 0; i < 50; ++i) strangers.emplace_back(pair.reader->addresses()[0]);
  for (RawPeer& stranger : strangers) EXPECT_TRUE(stranger.wait_closed());
  EXPECT_LE(stat(*pair.reader, "num_streams"), 4u);
  expect_healthy(pair);
}

TEST_F(Auth, GarbageInsteadOfAHandshakeIsRefused) {
  testing::TransportPair pair(options(&good_), options(&good_), 4096);
  base::Prng prng(5);
  for (int i = 0; i < 200; ++i) {
    RawPeer stranger(pair.reader->addresses()[0]);
    stranger.send(random_bytes(wire::kHelloBytes + prng.below(300), prng.next()));
    EXPECT_TRUE(stranger.wait_closed());
  }
  EXPECT_TRUE(wait_stat(*pair.reader, "num_streams", 0));
  EXPECT_EQ(stat(*pair.reader, "num_peers"), 0u);
  expect_healthy(pair);
}

}  // namespace
}  // namespace tpusync::transport
