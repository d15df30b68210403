// A Ticket is the receipt for work that runs elsewhere: a copy, a read, a write.
//
//   pending --start--> running --complete--> done
//      `----------cancel (not started)-------^
//
// A ticket is done only when no byte of its work can move any more.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "tpusync/base/error.h"

namespace tpusync::exec {

enum class TicketState : unsigned char { kPending, kRunning, kDone };

using Deadline = std::optional<std::chrono::steady_clock::time_point>;  // nullopt: no deadline

class TicketSource;

// A value: copies share one state. Thread-safe.
class Ticket {
 public:
  // A ticket that was never issued; done() is true and status() is ok, so that "nothing to do" needs no
  // branch.
  Ticket() = default;

  TicketState state() const;
  bool done() const { return state() == TicketState::kDone; }

  // Blocks until done or until `deadline`; answers done(). The work goes on after a false.
  bool wait(Deadline deadline = std::nullopt) const;

  // Asks the work to stop. It resolves as kCancelled if it had not started; what runs may still finish.
  void cancel() const;

  // What the work answered; an error of code kBusy while it is not done.
  base::Status status() const;

 private:
  friend class TicketSource;
  struct Shared;
  explicit Ticket(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}
  std::shared_ptr<Shared> shared_;
};

// The side that does the work. Thread-safe. One work item may be done in `num_parts` parts on several
// threads: the ticket is done when each part has been finished, with the first error that any part reported.
class TicketSource {
 public:
  explicit TicketSource(int num_parts = 1);

  Ticket ticket() const { return Ticket(shared_); }

  // Marks the work as started. False if it was cancelled before: the caller still finishes the part.
  bool start() const;

  // True once somebody called cancel(): long work looks at it between its steps.
  bool cancel_requested() const;

  // Ends one part. `done` callbacks given to on_done run on the thread that ends the last one.
  void finish_part(base::Status status) const;

  // Runs `callback` when the work is done, at once if it already is. The callback must not block.
  void on_done(std::function<void()> callback) const;

 private:
  std::shared_ptr<Ticket::Shared> shared_;
};

}  // namespace tpusync::exec
