#include "tpusync/wire/handshake.h"

#include <gtest/gtest.h>

#include "tpusync/wire/auth.h"

namespace tpusync::wire {
namespace {

using base::Code;

Hello sample_hello() {
  Hello hello;
  hello.stream = 1;
  hello.num_streams = 4;
  hello.generation = 0x0102030405060708;
  hello.initiator.fill(std::byte{0xaa});
  hello.nonce.fill(std::byte{0xbb});
  return hello;
}

Challenge sample_challenge() {
  Challenge challenge;
  challenge.acceptor.fill(std::byte{0xcc});
  challenge.nonce.fill(std::byte{0xdd});
  return challenge;
}

Bytes encoded(const Hello& hello) {
  Bytes out;
  Writer writer(out);
  encode_hello(hello, writer);
  return out;
}

Bytes encoded(const Challenge& challenge) {
  Bytes out;
  Writer writer(out);
  encode_challenge(challenge, writer);
  return out;
}

Bytes bytes_of(std::initializer_list<int> values) {
  Bytes out;
  for (const int value : values) out.push_back(static_cast<std::byte>(value));
  return out;
}

TEST(Handshake, MessagesHaveTheirGoldenBytes) {
  Bytes hello =
      bytes_of({0x54, 0x50, 0x53, 0x48, 1, 0, 1, 0, 4, 0, 0, 0, 0, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1});
  hello.insert(hello.end(), 16, std::byte{0xaa});
  hello.insert(hello.end(), 32, std::byte{0xbb});
  EXPECT_EQ(encoded(sample_hello()), hello);
  EXPECT_EQ(hello.size(), kHelloBytes);
  Bytes challenge = bytes_of({0x54, 0x50, 0x53, 0x48, 1, 0, 0, 0});
  challenge.insert(challenge.end(), 16, std::byte{0xcc});
  challenge.insert(challenge.end(), 32, std::byte{0xdd});
  EXPECT_EQ(encoded(sample_challenge()), challenge);
  EXPECT_EQ(challenge.size(), kChallengeBytes);
}

TEST(Handshake, DecodesWhatWasEncoded) {
  EXPECT_EQ(*decode_hello(encoded(sample_hello())), sample_hello());
  EXPECT_EQ(*decode_challenge(encoded(sample_challenge())), sample_challenge());
}

TEST(Handshake, RefusesTruncationsAndOtherVersions) {
  const Bytes hello = encoded(sample_hello());
  for (std::size_t n = 0; n < hello.size(); ++n) EXPECT_FALSE(decode_hello(std::span(hello).first(n)));
  Hello newer = sample_hello();
  newer.version = 2;
  EXPECT_EQ(decode_hello(encoded(newer)).error().code, Code::kUnsupported);
  Hello odd = sample_hello();
  odd.stream = 4;
  EXPECT_EQ(decode_hello(encoded(odd)).error().code, Code::kCorrupt);
  odd = sample_hello();
  odd.num_streams = kStreamsMax + 1;
  EXPECT_EQ(decode_hello(encoded(odd)).error().code, Code::kCorrupt);
}

class Proofs : public testing::Test {
 protected:
  const Bytes secret_ = bytes_of({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16});
  const Bytes other_secret_ = bytes_of({2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16});
  Transcript transcript_ = encoded(sample_hello());
};

TEST_F(Proofs, HoldForTheirSecretRoleAndTranscriptOnly) {
  const Proof proof = make_proof(secret_, Role::kInitiator, transcript_);
  EXPECT_TRUE(check_proof(secret_, Role::kInitiator, transcript_, proof));
  EXPECT_FALSE(check_proof(other_secret_, Role::kInitiator, transcript_, proof));
  EXPECT_FALSE(check_proof({}, Role::kInitiator, transcript_, proof));
  EXPECT_FALSE(check_proof(secret_, Role::kAcceptor, transcript_, proof));  // reflected
  for (std::byte& b : transcript_) {
    b ^= std::byte{1};
    EXPECT_FALSE(check_proof(secret_, Role::kInitiator, transcript_, proof));
    b ^= std::byte{1};
  }
}

TEST_F(Proofs, KeysDifferByDirectionSecretAndTranscript) {
  const StreamKeys keys = derive_keys(secret_, transcript_);
  EXPECT_NE(keys.from_initiator, keys.from_acceptor);
  EXPECT_NE(keys.from_initiator, derive_keys(other_secret_, transcript_).from_initiator);
  transcript_.back() ^= std::byte{1};
  EXPECT_NE(keys.from_initiator, derive_keys(secret_, transcript_).from_initiator);
}

TEST_F(Proofs, HmacIsThatOfTheStandard) {
  // HMAC-SHA-256 over label and transcript, computed with another implementation (Python's hmac).
  const Proof proof = make_proof(secret_, Role::kInitiator, bytes_of({0x41, 0x42}));
  const Bytes head(proof.begin(), proof.begin() + 8);
  EXPECT_EQ(head, bytes_of({0xef, 0xa2, 0x38, 0x74, 0x81, 0x74, 0xfa, 0xb4}));
}

}  // namespace
}  // namespace tpusync::wire
