#include "tpusync/transport/inbox.h"

#include <utility>

namespace tpusync::transport {

namespace {

constexpr std::size_t kLostMax = 65536;

}  // namespace

bool Inbox::push_message(PeerId from, std::span<const std::byte> message) {
  std::lock_guard lock(mutex_);
  if (closed_) return false;
  Held& held = held_[from];
  if (held.num_messages >= messages_max_ ||
      (held.num_messages > 0 && held.bytes + message.size() > bytes_max_)) {
    return false;
  }
  ++held.num_messages;
  held.bytes += message.size();
  events_.push_back({Event::Kind::kMessage, from, {message.begin(), message.end()}, {}});
  changed_.notify_one();
  return true;
}

void Inbox::push_lost(PeerId peer, std::string reason) {
  std::lock_guard lock(mutex_);
  if (closed_ || num_lost_ >= kLostMax) return;
  ++num_lost_;
  events_.push_back({Event::Kind::kLost, peer, {}, std::move(reason)});
  changed_.notify_one();
}

std::vector<Event> Inbox::take(std::size_t count_max, exec::Deadline deadline) {
  std::unique_lock lock(mutex_);
  const auto ready = [this] { return !events_.empty() || closed_; };
  if (!deadline) changed_.wait(lock, ready);
  if (deadline) changed_.wait_until(lock, *deadline, ready);
  std::vector<Event> out;
  while (!events_.empty() && out.size() < count_max) {
    Event& event = events_.front();
    if (event.kind == Event::Kind::kLost) {
      --num_lost_;
    } else {
      const auto held = held_.find(event.peer);
      held->second.bytes -= event.message.size();
      if (--held->second.num_messages == 0) held_.erase(held);
    }
    out.push_back(std::move(event));
    events_.pop_front();
  }
  return out;
}

void Inbox::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

}  // namespace tpusync::transport
