#include "tpusync/index/replay.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tpusync/base/prng.h"

namespace tpusync::index {
namespace {

Requests requests_of(const std::vector<std::vector<PageNumber>>& paths) {
  Requests requests;
  for (const auto& path : paths) {
    requests.pages.insert(requests.pages.end(), path.begin(), path.end());
    requests.ends.push_back(requests.pages.size());
  }
  return requests;
}

std::uint64_t hits(ReplayPolicy policy, const Requests& requests, std::size_t num_slots) {
  return replay(requests, *make_replay_cache(policy, requests, num_slots), {}).num_hits;
}

// Documents of popularity by rank with one page of their own behind them, and paths that never return.
Requests random_requests(std::uint64_t seed, int num_requests) {
  base::Prng prng(seed);
  std::vector<std::vector<PageNumber>> paths;
  PageNumber next = 60 * 8;
  for (int i = 0; i < num_requests; ++i) {
    std::vector<PageNumber> path;
    if (prng.one_in(3)) {
      for (std::uint64_t n = 1 + prng.below(20); n > 0; --n) path.push_back(next++);
    } else {
      const auto document = static_cast<PageNumber>(std::min(prng.below(60), prng.below(60)));
      for (PageNumber j = 0; j <= document % 8; ++j) path.push_back(document * 8 + j);
      path.push_back(next++);
    }
    paths.push_back(path);
  }
  return requests_of(paths);
}

TEST(Replay, EveryPolicyHitsAllThatReturnsWhenThereIsRoom) {
  const Requests requests = requests_of({{0, 1, 2}, {0, 1, 3}, {0, 1, 2, 4}});
  for (auto policy :
       {ReplayPolicy::kReuse, ReplayPolicy::kLeafLru, ReplayPolicy::kLru, ReplayPolicy::kS3Fifo})
    EXPECT_EQ(hits(policy, requests, 100), 5u) << static_cast<int>(policy);
  EXPECT_EQ(num_hits_of_optimum(requests, 100), 5u);
}

TEST(Replay, OnlyLeadingPagesAreHits) {
  // Page 0 is gone when its path returns, as it is the last of the two to have been touched in plain order.
  const Requests requests = requests_of({{0, 1}, {2, 3, 4}, {0, 1}});
  EXPECT_EQ(hits(ReplayPolicy::kLru, requests, 4), 1u);
  EXPECT_EQ(num_hits_of_optimum(requests, 4), 2u);
}

TEST(Replay, NobodyBeatsTheOptimum) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    const Requests requests = random_requests(seed, 2000);
    for (std::size_t num_slots : {20, 100, 400}) {
      const std::uint64_t best = num_hits_of_optimum(requests, num_slots);
      for (auto policy :
           {ReplayPolicy::kReuse, ReplayPolicy::kLeafLru, ReplayPolicy::kLru, ReplayPolicy::kS3Fifo}) {
        const auto cache = make_replay_cache(policy, requests, num_slots);
        const ReplayResult result = replay(requests, *cache, {});
        EXPECT_LE(result.num_hits, best) << "policy " << static_cast<int>(policy);
        EXPECT_LE(result.num_written, result.num_pages);
      }
    }
  }
}

TEST(Replay, LeafFirstIsLeastRecentlyUsedOverPathsThatAreTouchedAsAWhole) {
  // The engine's index with its plain order and pages by themselves keep the same pages, almost: a new page
  // enters behind its parent, not in front of it.
  const Requests requests = random_requests(11, 4000);
  const auto leaf = static_cast<double>(hits(ReplayPolicy::kLeafLru, requests, 200));
  const auto plain = static_cast<double>(hits(ReplayPolicy::kLru, requests, 200));
  EXPECT_NEAR(leaf / plain, 1.0, 0.02);
}

TEST(Replay, AFrontHidesItsHits) {
  const Requests requests = requests_of({{0, 1, 2}, {0, 1, 2}, {0, 1, 2, 3}});
  const auto cache = make_replay_cache(ReplayPolicy::kLru, requests, 10);
  const ReplayResult result = replay(requests, *cache, {.front_pages = 10});
  EXPECT_EQ(result.num_front_hits, 6u);
  EXPECT_EQ(result.num_hits, 0u);
  EXPECT_EQ(result.num_written, 4u);
}

// Everybody shares page 0, which the front always holds: a cache that is not told loses it, and with it all.
TEST(Replay, AncestorsThatAreTouchedSurviveACrash) {
  std::vector<std::vector<PageNumber>> paths;
  for (PageNumber i = 0; i < 2000; ++i) paths.push_back({0, 1 + i % 7, 10 + i});
  const Requests requests = requests_of(paths);
  const ReplayOptions options = {.front_pages = 50, .num_requests_after_crash = 50};
  const auto rate = [&](ReplayPolicy policy) {
    return replay(requests, *make_replay_cache(policy, requests, 100), options).hit_rate_after_crash;
  };
  EXPECT_EQ(rate(ReplayPolicy::kLru), 0);
  EXPECT_GT(rate(ReplayPolicy::kLeafLru), 0.6);
  EXPECT_GT(rate(ReplayPolicy::kReuse), 0.6);
}

TEST(Replay, TheSameRequestsGiveTheSameResult) {
  const Requests requests = random_requests(3, 3000);
  EXPECT_EQ(hits(ReplayPolicy::kReuse, requests, 150), hits(ReplayPolicy::kReuse, requests, 150));
}

TEST(Replay, NoRequestsAndEmptyRequestsAreNoHits) {
  for (const Requests& requests : {Requests(), requests_of({{}, {}})}) {
    const auto cache = make_replay_cache(ReplayPolicy::kReuse, requests, 1);
    EXPECT_EQ(replay(requests, *cache, {.front_pages = 3, .num_requests_after_crash = 5}).num_pages, 0u);
    EXPECT_EQ(num_hits_of_optimum(requests, 1), 0u);
  }
}

}  // namespace
}  // namespace tpusync::index
