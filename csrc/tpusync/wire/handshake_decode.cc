#include <fmt/format.h>

#include "tpusync/wire/handshake.h"
#include "tpusync/wire/reader.h"

namespace tpusync::wire {

using base::Code;
using base::fail;
using base::Result;
using base::Status;

namespace {

Status check_start(std::uint32_t magic, std::uint16_t version) {
  if (magic != kHandshakeMagic) return fail(Code::kCorrupt, "the other side does not speak this protocol");
  if (version != kVersion) {
    return fail(Code::kUnsupported,
                fmt::format("the other side speaks version {}, this one {}", version, kVersion));
  }
  return {};
}

}  // namespace

Result<Hello> decode_hello(std::span<const std::byte> bytes) {
  Reader in(bytes);
  Hello hello;
  const std::uint32_t magic = in.u32();
  hello.version = in.u16();
  hello.stream = in.u16();
  hello.num_streams = in.u16();
  const std::uint16_t reserved_first = in.u16();
  const std::uint32_t reserved = in.u32();
  hello.generation = in.u64();
  in.array(hello.initiator);
  in.array(hello.nonce);
  if (!in.finished()) return fail(Code::kCorrupt, fmt::format("a hello of {} bytes", bytes.size()));
  TPUSYNC_TRY(check_start(magic, hello.version));
  if (reserved_first != 0 || reserved != 0 || hello.num_streams == 0 || hello.num_streams > kStreamsMax ||
      hello.stream >= hello.num_streams) {
    return fail(Code::kCorrupt, fmt::format("stream {} of {}", hello.stream, hello.num_streams));
  }
  return hello;
}

Result<Challenge> decode_challenge(std::span<const std::byte> bytes) {
  Reader in(bytes);
  Challenge challenge;
  const std::uint32_t magic = in.u32();
  challenge.version = in.u16();
  const std::uint16_t reserved = in.u16();
  in.array(challenge.acceptor);
  in.array(challenge.nonce);
  if (!in.finished()) return fail(Code::kCorrupt, fmt::format("a challenge of {} bytes", bytes.size()));
  TPUSYNC_TRY(check_start(magic, challenge.version));
  if (reserved != 0) return fail(Code::kCorrupt, "a reserved bit is set");
  return challenge;
}

}  // namespace tpusync::wire
