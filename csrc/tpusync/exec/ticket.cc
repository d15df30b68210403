#include "tpusync/exec/ticket.h"

#include <condition_variable>
#include <mutex>
#include <vector>

namespace tpusync::exec {

using base::Code;
using base::Status;

struct Ticket::Shared {
  mutable std::mutex mutex;
  mutable std::condition_variable changed;
  TicketState state = TicketState::kPending;
  int parts_left = 1;
  bool cancel_requested = false;
  Status status;
  std::vector<std::function<void()>> callbacks;
};

TicketState Ticket::state() const {
  if (!shared_) return TicketState::kDone;
  std::lock_guard lock(shared_->mutex);
  return shared_->state;
}

bool Ticket::wait(Deadline deadline) const {
  if (!shared_) return true;
  std::unique_lock lock(shared_->mutex);
  const auto is_done = [this] { return shared_->state == TicketState::kDone; };
  if (deadline) return shared_->changed.wait_until(lock, *deadline, is_done);
  shared_->changed.wait(lock, is_done);
  return true;
}

void Ticket::cancel() const {
  if (!shared_) return;
  std::lock_guard lock(shared_->mutex);
  shared_->cancel_requested = true;
}

Status Ticket::status() const {
  if (!shared_) return {};
  std::lock_guard lock(shared_->mutex);
  if (shared_->state != TicketState::kDone) return base::fail(Code::kBusy, "the work is not done");
  return shared_->status;
}

TicketSource::TicketSource(int num_parts) : shared_(std::make_shared<Ticket::Shared>()) {
  shared_->parts_left = num_parts;
  if (num_parts == 0) shared_->state = TicketState::kDone;
}

bool TicketSource::start() const {
  std::lock_guard lock(shared_->mutex);
  if (shared_->cancel_requested) return false;
  if (shared_->state == TicketState::kPending) shared_->state = TicketState::kRunning;
  return true;
}

bool TicketSource::cancel_requested() const {
  std::lock_guard lock(shared_->mutex);
  return shared_->cancel_requested;
}

void TicketSource::finish_part(Status status) const {
  std::vector<std::function<void()>> callbacks;
  {
    std::lock_guard lock(shared_->mutex);
    if (!status && shared_->status) shared_->status = std::move(status);
    if (--shared_->parts_left > 0) return;
    shared_->state = TicketState::kDone;
    callbacks.swap(shared_->callbacks);
    shared_->changed.notify_all();
  }
  for (auto& callback : callbacks) callback();
}

void TicketSource::on_done(std::function<void()> callback) const {
  {
    std::lock_guard lock(shared_->mutex);
    if (shared_->state != TicketState::kDone) {
      shared_->callbacks.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

}  // namespace tpusync::exec
