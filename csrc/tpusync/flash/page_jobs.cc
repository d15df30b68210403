#include "tpusync/flash/page_jobs.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "tpusync/base/log.h"

namespace tpusync::flash {

using base::Code;
using base::Status;
using index::SlotId;

index::Ancestry PageRequest::ancestry_of(std::size_t i) const {
  constexpr std::size_t kDepthMax = std::numeric_limits<std::uint16_t>::max();
  index::Ancestry ancestry;
  ancestry.depth = static_cast<std::uint16_t>(std::min(prefix.size() + i, kDepthMax));
  if (i > 0) {
    ancestry.parent = keys[i - 1].short_hash();
  } else if (!prefix.empty()) {
    ancestry.parent = prefix.back().short_hash();
  }
  return ancestry;
}

Code check_start(const Workshop& shop, const PageRequest& request) {
  if (shop.closing.load(std::memory_order_relaxed) || request.source.cancel_requested()) {
    shop.counters.cancelled.add();
    return Code::kCancelled;
  }
  if (request.deadline && shop.clock.now() >= *request.deadline) {
    shop.counters.expired.add();
    return Code::kDeadline;
  }
  return Code::kOk;
}

namespace {

class PutJob final : public IoJob {
 public:
  PutJob(Workshop& shop, PageRequest& request, std::span<const std::size_t> pages)
      : shop_(shop), request_(request), pages_(pages), writes_(pages.size()) {}

  std::size_t size() const override { return pages_.size(); }

  bool prepare(std::size_t i, Io& io) override {
    const Code code = start(i);
    outcome(i) = code;
    if (code != Code::kOk || !writes_[i].buffer) return false;
    io = {.is_write = true,
          .offset = shop_.space.region().slot_offset(writes_[i].slot),
          .pieces = writes_[i].buffer->pieces()};
    return true;
  }

  void complete(std::size_t i, Status status) override {
    Write& write = writes_[i];
    write.buffer.reset();
    if (!status) {
      outcome(i) = failed(status.error());
      shop_.space.release(write.slot);
    } else if (shop_.fsync == FsyncPolicy::kAlways) {
      write.waits_for_sync = true;
    } else {
      publish(i);
    }
  }

  // For the policy kAlways: payloads on the medium, then records, then those on the medium.
  void finish() {
    const auto waits = [](const Write& write) { return write.waits_for_sync; };
    if (std::none_of(writes_.begin(), writes_.end(), waits)) return;
    const Status synced = shop_.space.region().sync_slots();
    for (std::size_t i = 0; i < writes_.size(); ++i) {
      if (!waits(writes_[i])) continue;
      if (synced) {
        publish(i);
      } else {
        outcome(i) = failed(synced.error());
        shop_.space.release(writes_[i].slot);
      }
    }
    const Status table_synced = synced ? shop_.space.region().sync_table() : Status{};
    for (std::size_t i = 0; !table_synced && i < writes_.size(); ++i) {
      if (waits(writes_[i]) && outcome(i) == Code::kOk) outcome(i) = failed(table_synced.error());
    }
  }

 private:
  struct Write {
    SlotId slot = index::kNoSlot;
    SlotRecord record;
    std::optional<PageBuffer> buffer;
    bool waits_for_sync = false;
  };

  Code& outcome(std::size_t i) { return (*request_.outcomes)[pages_[i]]; }

  Code failed(const base::Error& error) {
    if (error.code == Code::kExhausted) {
      shop_.counters.refused_space.add();
    } else {
      shop_.counters.io_errors.add();
      shop_.counters.refused_io.add();
    }
    shop_.breaker.failed();
    return error.code;
  }

  // Admission, a slot, and the bytes to write. kOk without a buffer: the page is stored already.
  Code start(std::size_t i) {
    if (const Code code = check_start(shop_, request_); code != Code::kOk) return code;
    const index::PageKey& key = request_.keys[pages_[i]];
    if (shop_.space.present(key)) {
      shop_.counters.puts_present.add();
      return Code::kOk;
    }
    const std::uint64_t slot_bytes = shop_.space.region().slot_bytes();
    if (!shop_.budget.take(slot_bytes)) {
      shop_.counters.refused_budget.add();
      return Code::kExhausted;
    }
    const Code code = take_slot(i);
    if (code != Code::kOk) {
      shop_.budget.put_back(slot_bytes);
      return code;
    }
    fill(i, key);
    return Code::kOk;
  }

  Code take_slot(std::size_t i) {
    if (!shop_.breaker.allow()) {
      shop_.counters.refused_breaker.add();
      return Code::kExhausted;
    }
    const auto slot = shop_.space.acquire();
    if (slot) {
      writes_[i].slot = *slot;
      return Code::kOk;
    }
    if (slot.error().code != Code::kExhausted) return failed(slot.error());
    shop_.counters.refused_space.add();
    return Code::kExhausted;
  }

  void fill(std::size_t i, const index::PageKey& key) {
    Write& write = writes_[i];
    write.buffer.emplace(request_.addresses_of(pages_[i]), request_.lengths, shop_.space.region().slots(),
                         shop_.buffers);
    write.buffer->gather();
    if (write.buffer->bounced()) shop_.counters.bounced.add();
    std::uint64_t page_bytes = 0;
    for (const std::uint64_t length : request_.lengths) page_bytes += length;
    write.record = {.key = key,
                    .ancestry = request_.ancestry_of(pages_[i]),
                    .generation = shop_.space.next_generation(),
                    .payload_checksum = 0,
                    .length_bytes = static_cast<std::uint32_t>(page_bytes)};
    write.record.payload_checksum = write.buffer->checksum(payload_seed(key, write.record.generation));
  }

  void publish(std::size_t i) {
    const Write& write = writes_[i];
    const Status status = shop_.space.publish(write.slot, write.record, request_.clear_count);
    if (status) {
      shop_.counters.put_bytes.add(write.record.length_bytes);
      shop_.breaker.succeeded();
      shop_.unsynced.store(true, std::memory_order_relaxed);
      outcome(i) = Code::kOk;
    } else if (status.error().code == Code::kCancelled) {
      shop_.counters.cancelled.add();
      outcome(i) = Code::kCancelled;
    } else {
      outcome(i) = failed(status.error());
    }
  }

  Workshop& shop_;
  PageRequest& request_;
  const std::span<const std::size_t> pages_;
  std::vector<Write> writes_;
};

class GetJob final : public IoJob {
 public:
  GetJob(Workshop& shop, PageRequest& request, std::span<const PinnedPage> pages)
      : shop_(shop), request_(request), pages_(pages), buffers_(pages.size()) {}

  std::size_t size() const override { return pages_.size(); }

  bool prepare(std::size_t i, Io& io) override {
    const Code code = check_start(shop_, request_);
    if (code != Code::kOk) {
      finish(i, code);
      return false;
    }
    buffers_[i].emplace(request_.addresses_of(pages_[i].index), request_.lengths,
                        shop_.space.region().slots(), shop_.buffers);
    io = {.is_write = false,
          .offset = shop_.space.region().slot_offset(pages_[i].slot.slot),
          .pieces = buffers_[i]->pieces()};
    return true;
  }

  void complete(std::size_t i, Status status) override {
    const Code code = verify(i, status);
    if (code == Code::kOk) {
      buffers_[i]->scatter();
      if (buffers_[i]->bounced()) shop_.counters.bounced.add();
      std::uint64_t page_bytes = 0;
      for (const std::uint64_t length : request_.lengths) page_bytes += length;
      shop_.counters.hits.add();
      shop_.counters.get_bytes.add(page_bytes);
    } else {
      shop_.counters.misses.add();
      shop_.space.drop(pages_[i].slot.slot, pages_[i].slot.generation);
    }
    buffers_[i].reset();
    finish(i, code);
  }

 private:
  Code verify(std::size_t i, const Status& status) {
    if (!status) {
      shop_.counters.io_errors.add();
      return Code::kIo;
    }
    const PinnedSlot& slot = pages_[i].slot;
    const std::uint64_t seed = payload_seed(request_.keys[pages_[i].index], slot.generation);
    if (buffers_[i]->checksum(seed) == slot.payload_checksum) return Code::kOk;
    shop_.counters.corrupt.add();
    if (!shop_.corrupt_said.exchange(true, std::memory_order_relaxed)) {
      base::log(base::LogLevel::kWarning,
                fmt::format(
                    "slot {} does not hold what was written to it; the page is a miss and its entry dropped "
                    "(further ones are only counted, see 'corrupt')",
                    index::to_number(slot.slot)));
    }
    return Code::kCorrupt;
  }

  void finish(std::size_t i, Code code) {
    shop_.space.unpin(pages_[i].slot.slot);
    (*request_.outcomes)[pages_[i].index] = code;
  }

  Workshop& shop_;
  PageRequest& request_;
  const std::span<const PinnedPage> pages_;
  std::vector<std::optional<PageBuffer>> buffers_;
};

}  // namespace

void run_put(Workshop& shop, PageRequest& request, std::span<const std::size_t> pages) {
  PutJob job(shop, request, pages);
  shop.io.run(shop.space.region().slots(), job);
  job.finish();
}

void refuse_put(Workshop& shop, PageRequest& request, std::span<const std::size_t> pages) {
  shop.counters.refused_busy.add(pages.size());
  for (const std::size_t page : pages) (*request.outcomes)[page] = Code::kBusy;
}

void run_get(Workshop& shop, PageRequest& request, std::span<const PinnedPage> pages) {
  GetJob job(shop, request, pages);
  shop.io.run(shop.space.region().slots(), job);
}

void refuse_get(Workshop& shop, PageRequest& request, std::span<const PinnedPage> pages) {
  shop.counters.refused_busy.add(pages.size());
  for (const PinnedPage& page : pages) {
    shop.space.unpin(page.slot.slot);
    (*request.outcomes)[page.index] = Code::kBusy;
  }
}

}  // namespace tpusync::flash
