// What a store counts. One field per sample; names are those of FlashStore::stats().
#pragma once

#include <vector>

#include "tpusync/metrics/metrics.h"

namespace tpusync::flash {

struct Counters {
  metrics::Counter puts;       // pages offered
  metrics::Counter put_bytes;  // payload written
  metrics::Counter puts_present;
  metrics::Counter gets;
  metrics::Counter get_bytes;
  metrics::Counter hits;
  metrics::Counter misses;
  metrics::Counter match_keys;
  metrics::Counter match_hits;
  metrics::Counter match_declined;  // keys not looked for because reading is slow or fails
  metrics::Counter corrupt;         // pages and records that were not what was written
  metrics::Counter io_errors;
  metrics::Counter refused_budget;
  metrics::Counter refused_space;
  metrics::Counter refused_admission;  // worth less than what would have to go
  metrics::Counter refused_busy;
  metrics::Counter refused_io;
  metrics::Counter refused_breaker;
  metrics::Counter expired;  // pages whose deadline passed before their turn
  metrics::Counter cancelled;
  metrics::Counter evicted;
  metrics::Counter outlived;  // entries older than the TTL
  metrics::Counter removed;
  metrics::Counter bounced;  // pages copied because memory was not aligned for direct transfers
  metrics::Counter ledger_resets;
  metrics::Counter regions_reclaimed;
  metrics::Counter extents_given_back;

  void append_to(std::vector<metrics::Sample>& samples) const;
};

}  // namespace tpusync::flash
