#include "tpusync/transport/inbox.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace tpusync::transport {
namespace {

const std::vector<std::byte> kMessage(10);

exec::Deadline now() {
  return std::chrono::steady_clock::now();
}

TEST(Inbox, APeerThatFloodsKeepsNobodyElseOut) {
  Inbox inbox(3, 1000);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(inbox.push_message(1, kMessage));
  EXPECT_FALSE(inbox.push_message(1, kMessage));
  EXPECT_TRUE(inbox.push_message(2, kMessage));
  EXPECT_EQ(inbox.take(1, now()).size(), 1u);
  EXPECT_TRUE(inbox.push_message(1, kMessage));
  EXPECT_FALSE(inbox.push_message(1, kMessage));
}

TEST(Inbox, BytesOfAPeerAreLimitedAndOneMessageAlwaysFits) {
  Inbox inbox(100, 25);
  EXPECT_TRUE(inbox.push_message(1, kMessage));
  EXPECT_TRUE(inbox.push_message(1, kMessage));
  EXPECT_FALSE(inbox.push_message(1, kMessage));
  EXPECT_TRUE(inbox.push_message(2, std::vector<std::byte>(50)));
  EXPECT_FALSE(inbox.push_message(2, kMessage));
  EXPECT_EQ(inbox.take(3, now()).size(), 3u);
  EXPECT_TRUE(inbox.push_message(1, std::vector<std::byte>(25)));
}

TEST(Inbox, EventsComeInTheirOrder) {
  Inbox inbox(10, 1000);
  ASSERT_TRUE(inbox.push_message(1, kMessage));
  inbox.push_lost(1, "gone");
  const auto events = inbox.take(10, now());
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].message, kMessage);
  EXPECT_EQ(events[1].kind, Event::Kind::kLost);
  EXPECT_EQ(events[1].reason, "gone");
  EXPECT_TRUE(inbox.take(10, now()).empty());
}

TEST(Inbox, NewsOfLostPeersDoesNotFillTheMemory) {
  Inbox inbox(1, 1);
  for (PeerId peer = 1; peer <= 100000; ++peer) inbox.push_lost(peer, {});
  EXPECT_EQ(inbox.take(1000000, now()).size(), 65536u);
}

TEST(Inbox, ClosingWakesWhoWaits) {
  Inbox inbox(1, 1000);
  std::jthread waiting([&] { EXPECT_TRUE(inbox.take(1, std::nullopt).empty()); });
  inbox.close();
  waiting.join();
  EXPECT_FALSE(inbox.push_message(1, kMessage));
}

}  // namespace
}  // namespace tpusync::transport
