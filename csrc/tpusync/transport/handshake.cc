#include "tpusync/transport/handshake.h"

#include <algorithm>

namespace tpusync::transport {

using base::Code;
using base::fail;
using base::Status;
using wire::Role;

namespace {

void append(wire::Bytes& out, std::span<const std::byte> bytes) {
  out.insert(out.end(), bytes.begin(), bytes.end());
}

}  // namespace

Handshake Handshake::initiate(const Secret& secret, const wire::Hello& hello, wire::Bytes& out) {
  Handshake self(secret, Role::kInitiator, Step::kChallenge);
  self.self_ = hello.initiator;
  self.hello_ = hello;
  wire::fill_random(self.hello_.nonce);
  wire::Writer writer(self.transcript_);
  wire::encode_hello(self.hello_, writer);
  append(out, self.transcript_);
  return self;
}

Handshake Handshake::accept(const Secret& secret, const wire::EndpointId& self_id) {
  Handshake self(secret, Role::kAcceptor, Step::kHello);
  self.self_ = self_id;
  return self;
}

std::size_t Handshake::wanted_bytes() const {
  switch (step_) {
    case Step::kHello:
      return wire::kHelloBytes;
    case Step::kChallenge:
      return wire::kChallengeBytes;
    case Step::kProof:
      return wire::kProofBytes;
    case Step::kOpen:
      return 0;
  }
  return 0;
}

Status Handshake::advance(std::span<const std::byte> message, wire::Bytes& out) {
  switch (step_) {
    case Step::kHello:
      return take_hello(message, out);
    case Step::kChallenge:
      return take_challenge(message, out);
    case Step::kProof:
      return take_proof(message, out);
    case Step::kOpen:
      break;
  }
  return fail(Code::kInvalid, "the handshake is over");
}

Status Handshake::take_hello(std::span<const std::byte> message, wire::Bytes& out) {
  const base::Result<wire::Hello> hello = wire::decode_hello(message);
  if (!hello) return tl::unexpected(hello.error());
  if (hello->initiator == self_) return fail(Code::kInvalid, "an endpoint does not connect to itself");
  hello_ = *hello;
  other_ = hello->initiator;
  append(transcript_, message);
  wire::Challenge challenge;
  challenge.acceptor = self_;
  wire::fill_random(challenge.nonce);
  wire::Bytes encoded;
  wire::Writer writer(encoded);
  wire::encode_challenge(challenge, writer);
  append(transcript_, encoded);
  append(out, encoded);
  step_ = Step::kProof;
  return {};
}

Status Handshake::take_challenge(std::span<const std::byte> message, wire::Bytes& out) {
  const base::Result<wire::Challenge> challenge = wire::decode_challenge(message);
  if (!challenge) return tl::unexpected(challenge.error());
  if (challenge->acceptor == self_) return fail(Code::kInvalid, "an endpoint does not connect to itself");
  other_ = challenge->acceptor;
  append(transcript_, message);
  append(out, wire::make_proof(*secret_, Role::kInitiator, transcript_));
  step_ = Step::kProof;
  return {};
}

Status Handshake::take_proof(std::span<const std::byte> message, wire::Bytes& out) {
  wire::Proof proof{};
  if (message.size() != proof.size()) return fail(Code::kCorrupt, "a proof of another length");
  std::copy(message.begin(), message.end(), proof.begin());
  const Role prover = role_ == Role::kInitiator ? Role::kAcceptor : Role::kInitiator;
  if (!wire::check_proof(*secret_, prover, transcript_, proof)) {
    return fail(Code::kInvalid, "the other side does not know the secret");
  }
  if (role_ == Role::kAcceptor) append(out, wire::make_proof(*secret_, Role::kAcceptor, transcript_));
  keys_ = wire::derive_keys(*secret_, transcript_);
  step_ = Step::kOpen;
  return {};
}

const wire::FrameKey& Handshake::sending_key() const {
  return role_ == Role::kInitiator ? keys_.from_initiator : keys_.from_acceptor;
}

const wire::FrameKey& Handshake::receiving_key() const {
  return role_ == Role::kInitiator ? keys_.from_acceptor : keys_.from_initiator;
}

}  // namespace tpusync::transport
