#include "tpusync/transport/inbound.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace tpusync::transport {

using base::Code;
using base::fail;
using base::Result;
using base::Status;

namespace {

Result<std::size_t> read_into(int fd, std::span<iovec> parts) {
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  const ssize_t count = ::recvmsg(fd, &message, MSG_DONTWAIT);
  if (count > 0) return static_cast<std::size_t>(count);
  if (count == 0) return fail(Code::kDisconnected, "the other side closed the stream");
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return 0;
  return fail(Code::kDisconnected, fmt::format("receive: {}", std::strerror(errno)));
}

}  // namespace

Inbound::Inbound(const wire::FrameKey& key, std::uint64_t generation, bool need_checksum, FrameSink& sink)
    : key_(key), generation_(generation), need_checksum_(need_checksum), sink_(sink), buffer_(kBufferBytes) {}

Result<std::size_t> Inbound::receive(int fd) {
  const Result<std::size_t> count = payload_ ? read_payload(fd) : read_buffer(fd);
  if (!count || *count == 0) return count;
  TPUSYNC_TRY(parse());
  return count;
}

Result<std::size_t> Inbound::read_buffer(int fd) {
  if (buffer_.size() - end_ < kLookaheadBytes || at_ == end_) {
    std::memmove(buffer_.data(), buffer_.data() + at_, end_ - at_);
    end_ -= at_;
    at_ = 0;
  }
  iovec part{buffer_.data() + end_, buffer_.size() - end_};
  const Result<std::size_t> count = read_into(fd, {&part, 1});
  if (count) end_ += *count;
  return count;
}

// The buffer is empty while a payload is coming, so what lies behind the payload may be read into it.
Result<std::size_t> Inbound::read_payload(int fd) {
  std::array<iovec, 256> parts;
  std::size_t count = 0;
  std::size_t room = 0;
  if (refused_) {
    scratch_.resize(kScratchBytes);
    room = std::min(payload_left_, scratch_.size());
    parts[count++] = {scratch_.data(), room};
  }
  for (std::size_t i = at_target_; !refused_ && i < landing_.targets.size() && count + 1 < parts.size();
       ++i) {
    const std::size_t skip = i == at_target_ ? at_byte_ : 0;
    parts[count] = {static_cast<std::byte*>(landing_.targets[i].iov_base) + skip,
                    landing_.targets[i].iov_len - skip};
    room += parts[count++].iov_len;
  }
  if (room == payload_left_) parts[count++] = {buffer_.data(), kLookaheadBytes};
  const Result<std::size_t> got = read_into(fd, {parts.data(), count});
  if (!got) return got;
  const std::size_t landed = std::min(*got, payload_left_);
  advance_payload(landed);
  at_ = 0;
  end_ = *got - landed;
  return got;
}

void Inbound::advance_payload(std::size_t count) {
  payload_left_ -= count;
  while (count > 0 && !refused_) {
    const iovec& target = landing_.targets[at_target_];
    const std::size_t step = std::min(count, target.iov_len - at_byte_);
    if (sum_) sum_->update({static_cast<std::byte*>(target.iov_base) + at_byte_, step});
    count -= step;
    at_byte_ += step;
    if (at_byte_ == target.iov_len) {
      ++at_target_;
      at_byte_ = 0;
    }
  }
}

Status Inbound::parse() {
  while (true) {
    if (payload_) {
      while (payload_left_ > 0 && at_ < end_) {
        const std::size_t left = refused_ ? payload_left_ : landing_.targets[at_target_].iov_len - at_byte_;
        const std::size_t step = std::min(left, end_ - at_);
        if (!refused_) {
          std::memcpy(static_cast<std::byte*>(landing_.targets[at_target_].iov_base) + at_byte_,
                      buffer_.data() + at_, step);
        }
        at_ += step;
        advance_payload(step);
      }
      if (payload_left_ > 0) return {};
      TPUSYNC_TRY(end_payload());
    }
    const Result<bool> whole = parse_frame();
    if (!whole) return tl::unexpected(whole.error());
    if (!*whole) return {};
  }
}

// Takes one frame up to its payload off the buffer. False when it is not all there.
Result<bool> Inbound::parse_frame() {
  const std::span<const std::byte> bytes(buffer_.data() + at_, end_ - at_);
  if (bytes.size() < wire::kHeadBytes) return false;
  const Result<wire::Head> head = wire::decode_head(bytes.first(wire::kHeadBytes));
  if (!head) return tl::unexpected(head.error());
  const std::size_t signed_bytes = wire::kHeadBytes + head->table_bytes;
  if (bytes.size() < signed_bytes + wire::kTagBytes) return false;
  if (!wire::check_tag(key_, bytes.first(signed_bytes), bytes.subspan(signed_bytes, wire::kTagBytes))) {
    return fail(Code::kCorrupt, "a frame whose tag is wrong");
  }
  if (head->generation != generation_ || head->sequence != next_sequence_) {
    return fail(Code::kCorrupt, fmt::format("frame {} of generation {:x}, expected {} of {:x}",
                                            head->sequence, head->generation, next_sequence_, generation_));
  }
  ++next_sequence_;
  const auto table = bytes.subspan(wire::kHeadBytes, head->table_bytes);
  at_ += signed_bytes + wire::kTagBytes;
  if (head->type != wire::FrameType::kData) {
    TPUSYNC_TRY(sink_.on_control(*head, table));
    return true;
  }
  payload_ = *head;
  TPUSYNC_TRY(start_payload(table));
  return true;
}

Status Inbound::start_payload(std::span<const std::byte> table) {
  payload_left_ = payload_->payload_bytes;
  at_target_ = 0;
  at_byte_ = 0;
  refused_.reset();
  sum_.reset();
  Result<Landing> landing = sink_.on_data(table);
  if (!landing) {
    if (landing.error().code == Code::kCorrupt) return tl::unexpected(landing.error());
    refused_ = std::move(landing).error();
    return {};
  }
  std::size_t total = 0;
  for (const iovec& target : landing->targets) total += target.iov_len;
  if (total != payload_left_) {
    return fail(Code::kCorrupt, fmt::format("entries of {} bytes, a payload of {}", total, payload_left_));
  }
  const bool has_checksum = (payload_->flags & wire::kFlagChecksum) != 0;
  if (need_checksum_ && !has_checksum) {
    refused_ = base::Error{Code::kInvalid, "checksum: this endpoint wants one for every payload"};
    return {};
  }
  landing_ = std::move(*landing);
  if (has_checksum) sum_ = std::make_unique<base::Checksum>(0);
  return {};
}

Status Inbound::end_payload() {
  Status status;
  if (refused_) {
    status = tl::unexpected(*refused_);
  } else if (sum_ && sum_->value() != payload_->checksum) {
    status = fail(Code::kCorrupt, fmt::format("the checksum of {} bytes is wrong", payload_->payload_bytes));
  }
  landing_.end();
  const wire::Head head = *payload_;
  payload_.reset();
  return sink_.on_landed(head, std::move(status));
}

void Inbound::drop_revoked() {
  if (!landing_.active() || !landing_.revoked()) return;
  landing_.end();
  refused_ = base::Error{Code::kCancelled, "the grant was revoked"};
}

}  // namespace tpusync::transport
