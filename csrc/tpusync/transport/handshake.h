// The handshake of one stream, as a machine that takes whole messages and makes answers. Knows no socket.
//
//   initiator: await challenge --> await proof --> open
//   acceptor:  await hello --> await proof --> open
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "tpusync/base/error.h"
#include "tpusync/transport/secret.h"
#include "tpusync/wire/auth.h"
#include "tpusync/wire/handshake.h"

namespace tpusync::transport {

// Thread-compatible. An error is final: close the connection, and say nothing.
class Handshake {
 public:
  // The initiator's, which writes its Hello to `out` at once. `secret` must outlive the handshake.
  static Handshake initiate(const Secret& secret, const wire::Hello& hello, wire::Bytes& out);
  static Handshake accept(const Secret& secret, const wire::EndpointId& self);

  wire::Role role() const { return role_; }
  bool open() const { return step_ == Step::kOpen; }
  // Length of the message that advance() wants next; 0 once open.
  std::size_t wanted_bytes() const;
  // Takes that message and appends the answer to `out`. kInvalid: the other side does not know the secret.
  base::Status advance(std::span<const std::byte> message, wire::Bytes& out);

  // Once open (an acceptor's hello already before it proves itself).
  const wire::Hello& hello() const { return hello_; }
  const wire::EndpointId& other() const { return other_; }
  const wire::FrameKey& sending_key() const;
  const wire::FrameKey& receiving_key() const;

 private:
  enum class Step : unsigned char { kHello, kChallenge, kProof, kOpen };

  Handshake(const Secret& secret, wire::Role role, Step step) : secret_(&secret), role_(role), step_(step) {}
  base::Status take_hello(std::span<const std::byte> message, wire::Bytes& out);
  base::Status take_challenge(std::span<const std::byte> message, wire::Bytes& out);
  base::Status take_proof(std::span<const std::byte> message, wire::Bytes& out);

  const Secret* secret_;
  wire::Role role_;
  Step step_;
  wire::EndpointId self_{};
  wire::EndpointId other_{};
  wire::Hello hello_;
  wire::Transcript transcript_;
  wire::StreamKeys keys_;
};

}  // namespace tpusync::transport
