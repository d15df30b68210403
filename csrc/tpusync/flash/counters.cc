#include "tpusync/flash/counters.h"

namespace tpusync::flash {

void Counters::append_to(std::vector<metrics::Sample>& samples) const {
  const auto add = [&](const char* name, const metrics::Counter& counter) {
    samples.push_back({name, counter.value()});
  };
  add("puts", puts);
  add("put_bytes", put_bytes);
  add("puts_present", puts_present);
  add("gets", gets);
  add("get_bytes", get_bytes);
  add("hits", hits);
  add("misses", misses);
  add("match_keys", match_keys);
  add("match_hits", match_hits);
  add("match_declined", match_declined);
  add("corrupt", corrupt);
  add("io_errors", io_errors);
  add("refused_budget", refused_budget);
  add("refused_space", refused_space);
  add("refused_admission", refused_admission);
  add("refused_busy", refused_busy);
  add("refused_io", refused_io);
  add("refused_breaker", refused_breaker);
  add("expired", expired);
  add("cancelled", cancelled);
  add("evicted", evicted);
  add("outlived", outlived);
  add("removed", removed);
  add("bounced", bounced);
  add("ledger_resets", ledger_resets);
  add("regions_reclaimed", regions_reclaimed);
  add("extents_given_back", extents_given_back);
}

}  // namespace tpusync::flash
