#include "tpusync/wire/handshake.h"

namespace tpusync::wire {

void encode_hello(const Hello& hello, Writer& out) {
  out.u32(kHandshakeMagic);
  out.u16(hello.version);
  out.u16(hello.stream);
  out.u16(hello.num_streams);
  out.u16(0);
  out.u32(0);
  out.u64(hello.generation);
  out.bytes(hello.initiator);
  out.bytes(hello.nonce);
}

void encode_challenge(const Challenge& challenge, Writer& out) {
  out.u32(kHandshakeMagic);
  out.u16(challenge.version);
  out.u16(0);
  out.bytes(challenge.acceptor);
  out.bytes(challenge.nonce);
}

}  // namespace tpusync::wire
