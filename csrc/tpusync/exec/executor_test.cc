#include "tpusync/exec/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>

#include "tpusync/exec/ticket.h"

namespace tpusync::exec {
namespace {

using base::Code;

TEST(Executor, RunsEveryAcceptedJobBeforeItIsGone) {
  std::atomic<int> num_run = 0;
  {
    auto executor = Executor::open({.name = "test", .num_threads = 3, .queue_limit = 1000}).value();
    for (int i = 0; i < 1000; ++i) {
      while (!executor->submit([&] { num_run.fetch_add(1); })) std::this_thread::yield();
    }
  }
  EXPECT_EQ(num_run, 1000);
}

TEST(Executor, RefusesAtItsQueueLimit) {
  std::latch started(1), release(1);
  auto executor = Executor::open({.name = "test", .num_threads = 1, .queue_limit = 1}).value();
  ASSERT_TRUE(executor->submit([&] {
    started.count_down();
    release.wait();
  }));
  started.wait();
  ASSERT_TRUE(executor->submit([] {}));
  const auto refused = executor->submit([] {});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kBusy);
  release.count_down();
}

TEST(Executor, OpenNamesTheOptionThatIsOutOfRange) {
  EXPECT_EQ(Executor::open({.name = "", .num_threads = 1}).error().code, Code::kInvalid);
  EXPECT_NE(Executor::open({.name = "x", .num_threads = 0}).error().message.find("1 to 256"),
            std::string::npos);
  EXPECT_EQ(Executor::open({.name = "x", .num_threads = 1, .queue_limit = 0}).error().code, Code::kInvalid);
}

TEST(Ticket, IsDoneAfterItsLastPartWithTheFirstError) {
  TicketSource source(3);
  const Ticket ticket = source.ticket();
  EXPECT_EQ(ticket.state(), TicketState::kPending);
  EXPECT_EQ(ticket.status().error().code, Code::kBusy);
  EXPECT_TRUE(source.start());
  EXPECT_EQ(ticket.state(), TicketState::kRunning);
  source.finish_part({});
  source.finish_part(base::fail(Code::kIo, "first"));
  EXPECT_FALSE(ticket.done());
  EXPECT_FALSE(ticket.wait(std::chrono::steady_clock::now()));
  source.finish_part(base::fail(Code::kCorrupt, "second"));
  EXPECT_TRUE(ticket.wait());
  EXPECT_EQ(ticket.status().error().message, "first");
}

TEST(Ticket, CancelBeforeStartIsSeenByTheWorker) {
  TicketSource source;
  source.ticket().cancel();
  EXPECT_FALSE(source.start());
  EXPECT_TRUE(source.cancel_requested());
  source.finish_part(base::fail(Code::kCancelled, "cancelled"));
  EXPECT_EQ(source.ticket().status().error().code, Code::kCancelled);
}

TEST(Ticket, CallbackRunsOnceWhetherGivenBeforeOrAfter) {
  int num_called = 0;
  TicketSource source;
  source.on_done([&] { ++num_called; });
  source.finish_part({});
  EXPECT_EQ(num_called, 1);
  source.on_done([&] { ++num_called; });
  EXPECT_EQ(num_called, 2);
}

TEST(Ticket, OneThatWasNeverIssuedIsDone) {
  EXPECT_TRUE(Ticket().done());
  EXPECT_TRUE(Ticket().wait());
  EXPECT_TRUE(Ticket().status());
}

}  // namespace
}  // namespace tpusync::exec
