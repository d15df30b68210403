#include "tpusync/transport/peer.h"

#include <fmt/format.h>

#include <algorithm>

namespace tpusync::transport {

using base::Code;
using base::fail;
using base::Status;

namespace {

// Fetching from memory needs no socket buffer, so its frames may be larger: fewer round trips.
constexpr std::size_t kOfferBytes = 1024 * 1024;
constexpr std::size_t kSharesMax = 1024;

wire::Head head_of(wire::FrameType type, const Transfer& transfer) {
  wire::Head head;
  head.type = type;
  head.transfer = transfer.id;
  return head;
}

}  // namespace

Peer::Peer(Hub& hub, PeerId id, const wire::Hello& session, std::string remote, bool same_host)
    : hub_(hub),
      id_(id),
      session_(session),
      remote_(std::move(remote)),
      same_host_(same_host),
      joined_(session.num_streams),
      idle_(session.num_streams, true) {}

Peer::State Peer::state() const {
  std::lock_guard lock(mutex_);
  return state_;
}

wire::EndpointId Peer::endpoint() const {
  std::lock_guard lock(mutex_);
  return endpoint_;
}

std::size_t Peer::queued_bytes() const {
  std::lock_guard lock(mutex_);
  return queued_bytes_;
}

void Peer::finish(Finished& finished) {
  for (auto& [ticket, status] : finished) ticket.finish_part(std::move(status));
}

void Peer::attach(std::shared_ptr<StreamPort> stream) {
  std::lock_guard lock(mutex_);
  if (state_ == State::kLost) {
    stream->close(*why_);
  } else {
    attached_.push_back(std::move(stream));
  }
}

Status Peer::join(std::uint16_t index, std::shared_ptr<StreamPort> stream, const wire::EndpointId& endpoint) {
  bool complete = false;
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kLost) return fail(Code::kDisconnected, why_->message);
    if (index >= joined_.size() || joined_[index]) {
      return fail(Code::kInvalid, fmt::format("stream {} of {} is there already", index, joined_.size()));
    }
    if (num_joined_ > 0 && endpoint != endpoint_)
      return fail(Code::kInvalid, "the streams end at different endpoints");
    endpoint_ = endpoint;
    joined_[index] = std::move(stream);
    complete = ++num_joined_ == joined_.size();
    if (complete) {
      state_ = State::kOpen;
      attached_.clear();
    }
  }
  if (complete) {
    opened_.finish_part({});
    wake_idle(joined_.size());
  }
  return {};
}

void Peer::lose(const base::Error& why) {
  std::vector<std::shared_ptr<StreamPort>> streams;
  Finished finished;
  bool was_opening = false;
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kLost) return;
    was_opening = state_ == State::kOpening;
    state_ = State::kLost;
    why_ = why;
    streams = std::move(attached_);
    for (auto& stream : joined_) {
      if (stream) streams.push_back(std::move(stream));
    }
    for (auto* queue : {&urgent_, &writes_}) {
      for (const TransferRef& transfer : *queue) stop(*transfer, tl::unexpected(why), finished);
      queue->clear();
    }
    queued_bytes_ = 0;
  }
  for (const auto& stream : streams) stream->close(why);
  // Nobody who sees a ticket of this peer fail finds the peer still listed.
  hub_.deliver_lost(id_, why, !was_opening);
  finish(finished);
  if (was_opening) opened_.finish_part(tl::unexpected(why));
}

Status Peer::submit(TransferRef transfer) {
  std::size_t frames = 0;
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kLost) return tl::unexpected(*why_);
    const bool is_write = transfer->kind == Transfer::Kind::kWrite;
    auto& queue = is_write ? writes_ : urgent_;
    if (queue.size() >= hub_.options.queued_transfers_max) {
      return fail(Code::kBusy, fmt::format("queued_transfers_max: {} wait for {}", queue.size(), remote_));
    }
    if (queued_bytes_ > 0 && queued_bytes_ + transfer->length_bytes > hub_.options.queued_bytes_max) {
      return fail(Code::kBusy, fmt::format("queued_bytes_max: {} bytes wait for {}", queued_bytes_, remote_));
    }
    transfer->id = ++last_transfer_;
    queued_bytes_ += transfer->length_bytes;
    if (is_write && same_host_) request_shares(*transfer);
    frames = 1 + transfer->length_bytes / hub_.options.frame_bytes;
    queue.push_back(std::move(transfer));
  }
  wake_idle(frames);
  return {};
}

// Asks the peer, once per region, to fetch from it instead of having it sent. Until it agrees, bytes are
// sent.
void Peer::request_shares(const Transfer& transfer) {
  for (const RegionRef& region : transfer.sources) {
    if (shares_.size() >= kSharesMax || !shares_.emplace(region->id, false).second) continue;
    auto share = std::make_shared<Transfer>();
    share->kind = Transfer::Kind::kShare;
    share->id = ++last_transfer_;
    share->shared = *region;
    urgent_.push_back(std::move(share));
  }
}

// Nothing of it moves any more: its regions may be released as soon as somebody sees the ticket done.
void Peer::settle(Transfer& transfer, Finished& finished) {
  if (transfer.kind == Transfer::Kind::kShare && transfer.status) shares_[transfer.shared.id] = true;
  transfer.sources.clear();
  finished.emplace_back(transfer.ticket, transfer.status);
}

void Peer::wake_idle(std::size_t count) {
  std::vector<std::shared_ptr<StreamPort>> wanted;
  {
    std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < joined_.size() && wanted.size() < count; ++i) {
      if (!joined_[i] || !idle_[i]) continue;
      idle_[i] = false;
      wanted.push_back(joined_[i]);
    }
  }
  for (const auto& stream : wanted) stream->wake();
}

void Peer::stop(Transfer& transfer, Status status, Finished& finished) {
  transfer.stopped = true;
  if (transfer.status) transfer.status = std::move(status);
  if (transfer.resolved()) settle(transfer, finished);
}

bool Peer::next_frame(std::uint16_t stream, Time now, OutFrame& out, Time& retry) {
  Finished finished;
  bool found = false;
  {
    std::lock_guard lock(mutex_);
    found = state_ == State::kOpen && (next_urgent(out) || next_write(now, out, retry, finished));
    idle_[stream] = !found;
  }
  finish(finished);
  return found;
}

bool Peer::next_urgent(OutFrame& out) {
  if (urgent_.empty()) return false;
  TransferRef transfer = std::move(urgent_.front());
  urgent_.pop_front();
  transfer->stopped = true;
  ++transfer->frames_out;
  [[maybe_unused]] const bool started = transfer->ticket.start();
  wire::Writer table(out.table);
  if (transfer->kind == Transfer::Kind::kShare) {
    out.head = head_of(wire::FrameType::kShare, *transfer);
    const Region& region = transfer->shared;
    wire::encode_table(
        wire::ShareTable{region.id, region.length, reinterpret_cast<std::uintptr_t>(region.base)}, table);
  } else {
    out.head = head_of(wire::FrameType::kMessage, *transfer);
    queued_bytes_ -= transfer->length_bytes;
    table.bytes(transfer->message);
  }
  out.transfer = std::move(transfer);
  return true;
}

bool Peer::next_write(Time now, OutFrame& out, Time& retry, Finished& finished) {
  while (!writes_.empty()) {
    Transfer& transfer = *writes_.front();
    const bool cancelled = !transfer.ticket.start();
    if (cancelled || !transfer.status || (transfer.deadline && now >= *transfer.deadline)) {
      const Code code = cancelled ? Code::kCancelled : Code::kDeadline;
      stop(transfer, fail(code, fmt::format("a write to {} was not all sent", remote_)), finished);
      queued_bytes_ -= transfer.length_bytes;
      writes_.pop_front();
      continue;
    }
    const bool offer = same_host_ && is_offered(transfer);
    const std::size_t most =
        std::min(transfer.length_bytes,
                 offer ? std::max(kOfferBytes, hub_.options.frame_bytes) : hub_.options.frame_bytes);
    if (inflight_bytes_ > 0 && inflight_bytes_ + most > hub_.options.inflight_bytes_max) return false;
    const Time allowed = hub_.pacer.take(most, now);
    if (allowed > now) {
      retry = allowed;
      return false;
    }
    out.transfer = writes_.front();
    fill_write(transfer, offer, out);
    if (transfer.stopped) writes_.pop_front();
    return true;
  }
  return false;
}

// Whether all of what comes next lies in regions that the peer fetches from.
bool Peer::is_offered(const Transfer& transfer) const {
  const auto agreed = [&](const RegionRef& region) {
    const auto found = shares_.find(region->id);
    return found != shares_.end() && found->second;
  };
  return std::all_of(transfer.sources.begin() + static_cast<std::ptrdiff_t>(transfer.at_piece),
                     transfer.sources.end(), agreed);
}

void Peer::fill_write(Transfer& transfer, bool offer, OutFrame& out) {
  Slice slice = take_slice(
      transfer, offer ? std::max(kOfferBytes, hub_.options.frame_bytes) : hub_.options.frame_bytes);
  ++transfer.frames_out;
  transfer.stopped = transfer.at_piece == transfer.pieces.size();
  transfer.length_bytes -= slice.bytes;
  queued_bytes_ -= slice.bytes;
  inflight_bytes_ += slice.bytes;
  out.window_bytes = slice.bytes;
  out.head = head_of(offer ? wire::FrameType::kOffer : wire::FrameType::kData, transfer);
  wire::Writer table(out.table);
  if (!offer) {
    wire::encode_table(wire::DataTable{transfer.grant, slice.entries}, table);
    out.head.payload_bytes = static_cast<std::uint32_t>(slice.bytes);
    out.payload = std::move(slice);
    out.payload.sources.clear();  // the transfer holds them
    return;
  }
  wire::OfferTable offers{transfer.grant, {}};
  for (std::size_t i = 0; i < slice.entries.size(); ++i) {
    const auto offset = static_cast<const std::byte*>(slice.from[i].iov_base) - slice.sources[i]->base;
    offers.entries.push_back({slice.entries[i], slice.sources[i]->id, static_cast<std::uint64_t>(offset)});
  }
  wire::encode_table(offers, table);
}

void Peer::resolve(std::span<const Sent> frames, const Status& status) {
  Finished finished;
  bool more = false;
  {
    std::lock_guard lock(mutex_);
    for (const Sent& frame : frames) {
      inflight_bytes_ -= frame.window_bytes;
      Transfer& transfer = *frame.transfer;
      --transfer.frames_out;
      if (!status && transfer.status) transfer.status = status;
      if (transfer.resolved()) settle(transfer, finished);
    }
    more = !writes_.empty();
  }
  finish(finished);
  if (more) wake_idle(joined_.size());
}

void Peer::tick(Time now) {
  Finished finished;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(writes_, [&](const TransferRef& transfer) {
      const bool cancelled = transfer->ticket.cancel_requested();
      const bool late = transfer->deadline && now >= *transfer->deadline;
      if (!cancelled && !late && transfer->status) return false;
      queued_bytes_ -= transfer->length_bytes;
      stop(*transfer,
           fail(cancelled ? Code::kCancelled : Code::kDeadline,
                fmt::format("a write to {} was not all sent", remote_)),
           finished);
      return true;
    });
  }
  finish(finished);
}

}  // namespace tpusync::transport
