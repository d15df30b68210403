#include "tpusync/transport/outbound.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "tpusync/base/checksum.h"

namespace tpusync::transport {

namespace {

std::uint64_t checksum_of(const std::vector<iovec>& payload) {
  base::Checksum sum(0);
  for (const iovec& part : payload) sum.update({static_cast<const std::byte*>(part.iov_base), part.iov_len});
  return sum.value();
}

std::size_t length_of(const std::vector<iovec>& payload) {
  std::size_t length = 0;
  for (const iovec& part : payload) length += part.iov_len;
  return length;
}

}  // namespace

void Outbound::load(OutFrame frame) {
  frame.head.sequence = next_sequence_++;
  frame.head.generation = generation_;
  frame.head.table_bytes = static_cast<std::uint32_t>(frame.table.size());
  if (frame.head.payload_bytes > 0 && checksum_) {
    frame.head.flags |= wire::kFlagChecksum;
    frame.head.checksum = checksum_of(frame.payload.from);
  }
  Loaded loaded;
  loaded.bytes.reserve(wire::kHeadBytes + frame.table.size() + wire::kTagBytes);
  wire::Writer writer(loaded.bytes);
  wire::encode_head(frame.head, writer);
  writer.bytes(frame.table);
  writer.bytes(wire::make_tag(key_, loaded.bytes));
  loaded.payload = std::move(frame.payload.from);
  loaded.sequence = frame.head.sequence;
  loaded_bytes_ += loaded.bytes.size() + frame.head.payload_bytes;
  loaded_.push_back(std::move(loaded));
  if (frame.transfer) sent_.push_back({std::move(frame.transfer), frame.window_bytes, frame.head.sequence});
}

base::Result<std::size_t> Outbound::flush(int fd) {
  std::array<iovec, 1024> parts;
  std::size_t count = 0;
  std::size_t skip = written_bytes_;
  const auto add = [&](iovec part) {
    const std::size_t cut = std::min(skip, part.iov_len);
    skip -= cut;
    if (cut == part.iov_len || count == parts.size()) return;
    parts[count++] = {static_cast<std::byte*>(part.iov_base) + cut, part.iov_len - cut};
  };
  for (Loaded& loaded : loaded_) {
    add({loaded.bytes.data(), loaded.bytes.size()});
    for (const iovec& part : loaded.payload) add(part);
    if (count == parts.size()) break;
  }
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = count;
  const ssize_t written = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (written < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return 0;
    return base::fail(base::Code::kDisconnected, fmt::format("send: {}", std::strerror(errno)));
  }
  drop_written(static_cast<std::size_t>(written));
  return static_cast<std::size_t>(written);
}

void Outbound::drop_written(std::size_t count) {
  loaded_bytes_ -= count;
  written_bytes_ += count;
  while (!loaded_.empty()) {
    const std::size_t whole = loaded_.front().bytes.size() + length_of(loaded_.front().payload);
    if (written_bytes_ < whole) return;
    written_bytes_ -= whole;
    loaded_.pop_front();
  }
}

}  // namespace tpusync::transport
