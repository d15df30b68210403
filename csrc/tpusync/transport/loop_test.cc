#include "tpusync/transport/loop.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <future>

namespace tpusync::transport {
namespace {

// Counts what it is called for.
class Counting : public Handler {
 public:
  void on_ready(std::uint32_t) override {
    std::uint64_t value = 0;
    [[maybe_unused]] const ssize_t got = ::read(fd.get(), &value, sizeof value);
    ++num_ready;
    ready.set_value();
  }
  Time on_tick(Time) override {
    if (++num_ticks == 1) ticked.set_value();
    return Time::max();
  }
  void on_stop() override { ++num_stopped; }

  const Fd fd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::promise<void> ready;
  std::promise<void> ticked;
  int num_ready = 0;
  int num_ticks = 0;
  int num_stopped = 0;
};

class LoopTest : public ::testing::Test {
 protected:
  void add() {
    loop_->post([this] { loop_->add(handler_, handler_->fd.get(), EPOLLIN); });
  }
  void end() {
    loop_->stop();
    loop_->join();
  }
  const std::shared_ptr<Counting> handler_ = std::make_shared<Counting>();
  const std::unique_ptr<Loop> loop_ = *Loop::open("test");
};

TEST_F(LoopTest, CallsWhoIsReadyAndTicksWhoIsNew) {
  add();
  ASSERT_EQ(::eventfd_write(handler_->fd.get(), 1), 0);
  handler_->ready.get_future().wait();
  handler_->ticked.get_future().wait();
  end();
  EXPECT_EQ(handler_->num_ready, 1);
  EXPECT_EQ(handler_->num_ticks, 1);
}

TEST_F(LoopTest, WhoIsThereAtTheEndIsToldOnce) {
  add();
  end();
  EXPECT_EQ(handler_->num_stopped, 1);
  EXPECT_EQ(handler_.use_count(), 1);
}

TEST_F(LoopTest, WhoWasRemovedIsNotTold) {
  add();
  loop_->post([this] { loop_->remove(handler_.get(), handler_->fd.get()); });
  end();
  EXPECT_EQ(handler_->num_stopped, 0);
  EXPECT_EQ(handler_.use_count(), 1);
}

TEST_F(LoopTest, AJobPostedAfterTheEndIsDropped) {
  end();
  const auto owned = std::make_shared<int>();
  loop_->post([owned] { ADD_FAILURE(); });
}

}  // namespace
}  // namespace tpusync::transport
