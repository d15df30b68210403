// The receiving half of a stream: reads frames, checks them, and lets payload land straight where it belongs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tpusync/base/checksum.h"
#include "tpusync/base/error.h"
#include "tpusync/transport/grant.h"
#include "tpusync/wire/auth.h"
#include "tpusync/wire/frame.h"

namespace tpusync::transport {

// What is done with the frames. Called on the thread that calls receive(). An error closes the stream.
class FrameSink {
 public:
  virtual ~FrameSink() = default;
  // Where the payload of this kData frame goes. kCorrupt closes the stream; any other error refuses the
  // frame.
  virtual base::Result<Landing> on_data(std::span<const std::byte> table) = 0;
  // All of its payload has landed and is verified, or it is refused for the reason in `status`.
  virtual base::Status on_landed(const wire::Head& head, base::Status status) = 0;
  // Any other frame.
  virtual base::Status on_control(const wire::Head& head, std::span<const std::byte> table) = 0;
};

// Confined to the thread of its loop.
class Inbound {
 public:
  // `need_checksum`: payload without a checksum is refused.
  Inbound(const wire::FrameKey& key, std::uint64_t generation, bool need_checksum, FrameSink& sink);

  // One read and all that it completes. Answers the bytes read, 0 when there is nothing to read.
  // kDisconnected at the end of the stream, kCorrupt for bytes that are no frame of this stream.
  base::Result<std::size_t> receive(int fd);

  // If the grant of the payload that is landing was revoked, lets no further byte of it land.
  void drop_revoked();

 private:
  static constexpr std::size_t kBufferBytes =
      wire::kHeadBytes + wire::kTableBytesMax + wire::kTagBytes + 4096;
  static constexpr std::size_t kLookaheadBytes = 4096;  // behind a payload: the head of what follows it
  static constexpr std::size_t kScratchBytes = 64 * 1024;

  base::Result<std::size_t> read_payload(int fd);
  base::Result<std::size_t> read_buffer(int fd);
  base::Status parse();
  base::Result<bool> parse_frame();
  base::Status start_payload(std::span<const std::byte> table);
  void advance_payload(std::size_t count);
  base::Status end_payload();

  const wire::FrameKey key_;
  const std::uint64_t generation_;
  const bool need_checksum_;
  FrameSink& sink_;
  std::uint64_t next_sequence_ = 0;

  std::vector<std::byte> buffer_;  // [at_, end_) is not parsed yet
  std::size_t at_ = 0;
  std::size_t end_ = 0;

  std::optional<wire::Head> payload_;  // the frame whose payload is coming
  std::size_t payload_left_ = 0;
  Landing landing_;
  std::size_t at_target_ = 0;
  std::size_t at_byte_ = 0;
  std::optional<base::Error> refused_;
  std::unique_ptr<base::Checksum> sum_;
  std::vector<std::byte> scratch_;  // for payload that is refused
};

}  // namespace tpusync::transport
