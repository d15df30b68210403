#include <fmt/format.h>

#include <string>
#include <utility>

#include "tpusync/binding/bind.h"
#include "tpusync/index/replay.h"

namespace tpusync::binding {

using base::Code;
using index::PageNumber;
using index::ReplayPolicy;
using index::Requests;

namespace {

constexpr std::uint64_t kNumSlotsMax = 1 << 26;

constexpr std::pair<const char*, ReplayPolicy> kPolicies[] = {{"reuse", ReplayPolicy::kReuse},
                                                              {"leaf_lru", ReplayPolicy::kLeafLru},
                                                              {"lru", ReplayPolicy::kLru},
                                                              {"s3_fifo", ReplayPolicy::kS3Fifo}};

ReplayPolicy policy_named(const std::string& name) {
  for (const auto& [known, policy] : kPolicies) {
    if (name == known) return policy;
  }
  raise({Code::kInvalid, fmt::format("there is no policy '{}'", name)});
}

// Checked: ends that never go back, page numbers below their count, and no page twice in a request.
Requests requests_of(const Array<std::uint32_t>& pages, const Array<std::uint64_t>& ends) {
  const auto numbers = view(pages);
  Requests requests;
  requests.pages.assign(numbers.begin(), numbers.end());
  std::vector<std::uint64_t> seen_before(numbers.size(), 0);  // the end of the request that had it last
  std::uint64_t begin = 0;
  for (const std::uint64_t end : view(ends)) {
    if (end < begin || end > numbers.size())
      raise({Code::kInvalid, fmt::format("a request ends at {} of {} pages", end, numbers.size())});
    for (const PageNumber page : numbers.subspan(begin, end - begin)) {
      if (page >= numbers.size() || std::exchange(seen_before[page], end) == end)
        raise({Code::kInvalid, fmt::format("page {} twice in a request, or too large", page)});
    }
    requests.ends.push_back(begin = end);
  }
  if (begin != numbers.size())
    raise({Code::kInvalid, fmt::format("{} pages are of no request", numbers.size() - begin)});
  return requests;
}

std::size_t checked_slots(std::uint64_t num_slots) {
  if (num_slots >= 1 && num_slots <= kNumSlotsMax) return num_slots;
  raise({Code::kInvalid, fmt::format("num_slots: {}, allowed are 1 to {}", num_slots, kNumSlotsMax)});
}

py::dict replay(const Array<std::uint32_t>& pages, const Array<std::uint64_t>& ends,
                const std::string& policy, std::uint64_t num_slots, std::size_t front_pages,
                std::size_t num_requests_after_crash) {
  const Requests requests = requests_of(pages, ends);
  const ReplayPolicy chosen = policy_named(policy);
  index::ReplayResult result;
  {
    const std::size_t slots = checked_slots(num_slots);
    const ReleasedGil released;
    const auto cache = index::make_replay_cache(chosen, requests, slots);
    result = index::replay(
        requests, *cache, {.front_pages = front_pages, .num_requests_after_crash = num_requests_after_crash});
  }
  py::dict answer;
  answer["pages"] = result.num_pages;
  answer["front_hits"] = result.num_front_hits;
  answer["hits"] = result.num_hits;
  answer["written"] = result.num_written;
  answer["hit_rate_after_crash"] = result.hit_rate_after_crash;
  return answer;
}

std::uint64_t optimum(const Array<std::uint32_t>& pages, const Array<std::uint64_t>& ends,
                      std::uint64_t num_slots) {
  const Requests requests = requests_of(pages, ends);
  const std::size_t slots = checked_slots(num_slots);
  const ReleasedGil released;
  return index::num_hits_of_optimum(requests, slots);
}

}  // namespace

void bind_evict(py::module_& module) {
  auto evict = module.def_submodule("evict");
  evict.def("replay", &replay, py::arg("pages").noconvert(), py::arg("ends").noconvert(), py::kw_only(),
            py::arg("policy"), py::arg("num_slots"), py::arg("front_pages"), py::arg("requests_after_crash"));
  evict.def("optimum", &optimum, py::arg("pages").noconvert(), py::arg("ends").noconvert(), py::kw_only(),
            py::arg("num_slots"));
}

}  // namespace tpusync::binding
