// The receiving side of a stream: what is done with each frame.
#include <fmt/format.h>

#include <algorithm>

#include "tpusync/transport/stream.h"

namespace tpusync::transport {

using base::Code;
using base::fail;
using base::Result;
using base::Status;
using std::chrono::steady_clock;

namespace {

constexpr std::size_t kRoundBytes = 1024 * 1024;  // then the other streams of this loop have their turn

template <typename T>
Status failed(const Result<T>& result) {
  return tl::unexpected(result.error());
}

}  // namespace

Status Stream::receive() {
  std::size_t round = 0;
  while (round < kRoundBytes && !outbound_->overloaded()) {
    const Result<std::size_t> count = inbound_->receive(fd_.get());
    if (!count) return failed(count);
    if (*count == 0) break;
    round += *count;
  }
  if (round > 0) last_heard_ = steady_clock::now();
  load_acknowledgement();
  return {};
}

Result<Landing> Stream::on_data(std::span<const std::byte> bytes) {
  const Result<wire::DataTable> table = wire::decode_data(bytes);
  if (!table) return tl::unexpected(table.error());
  return hub_.grants.land(table->grant, handshake_.other(), table->entries);
}

Status Stream::on_landed(const wire::Head& head, Status status) {
  if (status) hub_.counters.landed_bytes.fetch_add(head.payload_bytes, std::memory_order_relaxed);
  if (!status && status.error().code == Code::kCorrupt) {
    hub_.counters.frames_corrupt.fetch_add(1, std::memory_order_relaxed);
  }
  return settle(head, status);
}

// A frame that the other side waits for is dealt with.
Status Stream::settle(const wire::Head& head, const Status& status) {
  hub_.counters.frames_received.fetch_add(1, std::memory_order_relaxed);
  received_ = head.sequence + 1;
  if (status) return {};
  hub_.counters.frames_refused.fetch_add(1, std::memory_order_relaxed);
  acknowledged_ = received_;
  wire::Bytes table;
  wire::Writer writer(table);
  wire::encode_table(wire::RefuseTable{head.sequence, status.error().code, status.error().message}, writer);
  load_control(wire::FrameType::kRefuse, std::move(table));
  return {};
}

Status Stream::on_control(const wire::Head& head, std::span<const std::byte> bytes) {
  switch (head.type) {
    case wire::FrameType::kAck: {
      const Result<std::uint64_t> sequence = wire::decode_ack(bytes);
      return sequence ? handle_ack(*sequence) : failed(sequence);
    }
    case wire::FrameType::kRefuse: {
      const Result<wire::RefuseTable> refusal = wire::decode_refuse(bytes);
      return refusal ? handle_refusal(*refusal) : failed(refusal);
    }
    case wire::FrameType::kMessage: {
      if (bytes.empty()) return fail(Code::kCorrupt, "a message without a byte");
      const bool taken = hub_.deliver_message(peer_->id(), bytes);
      return settle(head, taken ? Status() : fail(Code::kBusy, "inbox_messages_max: the inbox is full"));
    }
    case wire::FrameType::kShare: {
      const Result<wire::ShareTable> share = wire::decode_share(bytes);
      if (!share) return failed(share);
      return settle(
          head, same_host_ ? fetcher_.share(*share) : fail(Code::kUnsupported, "not a stream of one host"));
    }
    case wire::FrameType::kOffer:
      return handle_offer(head, bytes);
    case wire::FrameType::kPing:
      return bytes.empty() ? Status() : fail(Code::kCorrupt, "a ping with a table");
    case wire::FrameType::kGoodbye: {
      const Result<wire::RefuseTable> goodbye = wire::decode_refuse(bytes);
      if (!goodbye) return failed(goodbye);
      return fail(Code::kDisconnected, fmt::format("the other side closed the stream: {}", goodbye->reason));
    }
    case wire::FrameType::kData:
      break;
  }
  return fail(Code::kCorrupt, "a frame that has no place here");
}

Status Stream::handle_offer(const wire::Head& head, std::span<const std::byte> bytes) {
  const Result<wire::OfferTable> table = wire::decode_offer(bytes);
  if (!table) return failed(table);
  if (!same_host_) return settle(head, fail(Code::kUnsupported, "not a stream of one host"));
  std::vector<wire::DataEntry> targets;
  targets.reserve(table->entries.size());
  std::uint64_t length = 0;
  for (const wire::OfferEntry& entry : table->entries) {
    targets.push_back(entry.target);
    length += entry.target.length;
  }
  if (length > wire::kPayloadBytesMax)
    return fail(Code::kCorrupt, fmt::format("an offer of {} bytes", length));
  const Result<Landing> landing = hub_.grants.land(table->grant, handshake_.other(), targets);
  if (!landing) return settle(head, failed(landing));
  const Status fetched = fetcher_.fetch(table->entries, *landing);
  // The bytes were those that were offered if the other side still waits: it closes before it gives its
  // memory to somebody else.
  if (is_closed_by_peer(fd_.get())) return fail(Code::kDisconnected, "the other side closed the stream");
  if (fetched) {
    hub_.counters.landed_bytes.fetch_add(length, std::memory_order_relaxed);
    hub_.counters.fetched_bytes.fetch_add(length, std::memory_order_relaxed);
  }
  return settle(head, fetched);
}

void Stream::resolve_until(std::uint64_t sequence) {
  auto& sent = outbound_->unacknowledged();
  std::vector<Peer::Sent> done;
  while (!sent.empty() && sent.front().sequence <= sequence) {
    done.push_back(std::move(sent.front()));
    sent.pop_front();
  }
  if (done.empty()) return;
  last_progress_ = steady_clock::now();
  peer_->resolve(done, {});
}

Status Stream::handle_ack(std::uint64_t sequence) {
  if (sequence >= outbound_->first_unwritten())
    return fail(Code::kCorrupt, "an acknowledgement of a frame not sent");
  resolve_until(sequence);
  return {};
}

Status Stream::handle_refusal(const wire::RefuseTable& refusal) {
  if (refusal.sequence >= outbound_->first_unwritten())
    return fail(Code::kCorrupt, "a refusal of a frame not sent");
  if (refusal.sequence > 0) resolve_until(refusal.sequence - 1);
  auto& sent = outbound_->unacknowledged();
  if (sent.empty() || sent.front().sequence != refusal.sequence)
    return fail(Code::kCorrupt, "a refusal of a frame twice");
  const Peer::Sent refused = std::move(sent.front());
  sent.pop_front();
  last_progress_ = steady_clock::now();
  peer_->resolve({&refused, 1},
                 fail(refusal.code, fmt::format("peer {} refused: {}", remote_, refusal.reason)));
  return {};
}

}  // namespace tpusync::transport
