#include <algorithm>
#include <iterator>

#include "tpusync/flash/page_jobs.h"

namespace tpusync::flash {

using base::Code;
using base::Status;
using index::SlotId;

namespace {

class PutJob final : public IoJob {
 public:
  PutJob(Workshop& shop, PageRequest& request) : shop_(shop), request_(request) {}

  // Chooses what is written and where; the others have their outcome now.
  void admit(std::span<const std::size_t> pages) {
    std::vector<std::size_t> admitted;
    std::copy_if(pages.begin(), pages.end(), std::back_inserter(admitted),
                 [this](std::size_t page) { return is_admitted(page); });
    std::vector<index::PageKey> keys;
    for (const std::size_t page : admitted) keys.push_back(request_.keys[page]);
    const SlotSpace::Acquired acquired = shop_.space.acquire(keys);
    slots_ = acquired.slots;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      writes_.push_back({.page = admitted[i], .record = {}, .buffer = nullptr});
    }
    for (std::size_t i = slots_.size(); i < admitted.size(); ++i) {
      shop_.budget.put_back(slot_bytes());
      outcome(admitted[i]) = Code::kExhausted;
      if (admitted.size() - i <= acquired.num_declined) continue;
      outcome(admitted[i]) = acquired.rest == Code::kExhausted ? no_space(1) : failed(acquired.rest, 1);
    }
    stretches_ = stretches_of(slots_, request_.page_bytes, slot_bytes());
    pieces_.resize(stretches_.size());
    begun_.resize(stretches_.size());
  }

  std::size_t size() const override { return stretches_.size(); }

  bool prepare(std::size_t i, Io& io) override {
    const Stretch stretch = stretches_[i];
    if (const Code code = check_start(shop_, request_, stretch.size()); code != Code::kOk) {
      for (std::size_t k = stretch.begin; k < stretch.end; ++k) {
        shop_.budget.put_back(slot_bytes());
        give_up(k, code);
      }
      return false;
    }
    begun_[i] = shop_.clock.now();
    for (std::size_t k = stretch.begin; k < stretch.end; ++k) {
      fill(k);
      const auto pieces = writes_[k].buffer->pieces();
      pieces_[i].insert(pieces_[i].end(), pieces.begin(), pieces.end());
    }
    io = {.is_write = true,
          .offset = shop_.space.region().slot_offset(slots_[stretch.begin]),
          .pieces = pieces_[i]};
    return true;
  }

  void complete(std::size_t i, Status status) override {
    const Stretch stretch = stretches_[i];
    for (std::size_t k = stretch.begin; k < stretch.end; ++k) writes_[k].buffer.reset();
    const bool slow = shop_.clock.now() - begun_[i] > shop_.latency_budget;
    if (status) slow ? shop_.breaker.failed() : shop_.breaker.succeeded();
    if (!status) {
      const Code code = failed(status.error().code, stretch.size());
      for (std::size_t k = stretch.begin; k < stretch.end; ++k) give_up(k, code);
    } else if (shop_.fsync == FsyncPolicy::kAlways) {
      unsynced_.push_back(stretch);
    } else {
      publish(stretch);
    }
  }

  // For the policy kAlways: payloads on the medium, then records, then those on the medium.
  void finish() {
    if (unsynced_.empty()) return;
    Status synced = shop_.space.region().sync_slots();
    for (const Stretch& stretch : unsynced_) {
      if (synced) {
        publish(stretch);
        continue;
      }
      const Code code = failed(synced.error().code, stretch.size());
      for (std::size_t k = stretch.begin; k < stretch.end; ++k) give_up(k, code);
    }
    if (!synced) return;
    synced = shop_.space.region().sync_table();
    if (synced) return;
    for (const Write& write : writes_) {
      if (outcome(write.page) == Code::kOk) outcome(write.page) = failed(synced.error().code, 1);
    }
  }

 private:
  struct Write {
    std::size_t page;
    SlotRecord record;
    std::unique_ptr<PageBuffer> buffer;  // while it is under way
  };

  std::uint64_t slot_bytes() const { return shop_.space.region().slot_bytes(); }
  Code& outcome(std::size_t page) { return (*request_.outcomes)[page]; }

  void give_up(std::size_t k, Code code) {
    outcome(writes_[k].page) = code;
    shop_.space.release(slots_[k]);
  }

  Code no_space(std::size_t num_pages) {
    shop_.counters.refused_space.add(num_pages);
    return Code::kExhausted;
  }

  // Of one transfer.
  Code failed(Code code, std::size_t num_pages) {
    shop_.breaker.failed();
    if (code == Code::kExhausted) return no_space(num_pages);
    shop_.counters.io_errors.add();
    shop_.counters.refused_io.add(num_pages);
    return code;
  }

  // False: the outcome is set. Admitted pages have their bytes of the budget.
  bool is_admitted(std::size_t page) {
    outcome(page) = check_start(shop_, request_, 1);
    if (outcome(page) != Code::kOk) return false;
    if (shop_.space.present(request_.keys[page])) {
      shop_.counters.puts_present.add();
      return false;
    }
    outcome(page) = Code::kExhausted;
    if (!shop_.budget.take(slot_bytes())) {
      shop_.counters.refused_budget.add();
      return false;
    }
    if (shop_.breaker.allow()) return true;
    shop_.budget.put_back(slot_bytes());
    shop_.counters.refused_breaker.add();
    return false;
  }

  void fill(std::size_t k) {
    Write& write = writes_[k];
    write.buffer = std::make_unique<PageBuffer>(request_.addresses_of(write.page), request_.lengths,
                                                shop_.space.region().slots(), shop_.buffers);
    write.buffer->gather();
    if (write.buffer->bounced()) shop_.counters.bounced.add();
    const index::PageKey& key = request_.keys[write.page];
    write.record = {.key = key,
                    .ancestry = request_.ancestry_of(write.page),
                    .generation = shop_.space.next_generation(),
                    .payload_checksum = 0,
                    .length_bytes = static_cast<std::uint32_t>(request_.page_bytes)};
    write.record.payload_checksum = write.buffer->checksum(payload_seed(key, write.record.generation));
  }

  void publish(const Stretch& stretch) {
    std::vector<SlotRecord> records;
    for (std::size_t k = stretch.begin; k < stretch.end; ++k) records.push_back(writes_[k].record);
    const std::vector<Code> codes = shop_.space.publish(slots_[stretch.begin], records, request_.clear_count);
    for (std::size_t k = stretch.begin; k < stretch.end; ++k) {
      Code& code = outcome(writes_[k].page) = codes[k - stretch.begin];
      if (code == Code::kOk) {
        shop_.counters.put_bytes.add(request_.page_bytes);
        shop_.unsynced.store(true, std::memory_order_relaxed);
      } else if (code == Code::kCancelled) {
        shop_.counters.cancelled.add();
      } else {
        code = failed(code, 1);
      }
    }
  }

  Workshop& shop_;
  PageRequest& request_;
  std::vector<Write> writes_;
  std::vector<SlotId> slots_;  // one per write
  std::vector<Stretch> stretches_;
  std::vector<std::vector<iovec>> pieces_;  // one per stretch
  std::vector<std::chrono::steady_clock::time_point> begun_;
  std::vector<Stretch> unsynced_;
};

}  // namespace

void run_put(Workshop& shop, PageRequest& request, std::span<const std::size_t> pages) {
  PutJob job(shop, request);
  job.admit(pages);
  shop.io.run(shop.space.region().slots(), job);
  job.finish();
}

void refuse_put(Workshop& shop, PageRequest& request, std::span<const std::size_t> pages) {
  shop.counters.refused_busy.add(pages.size());
  for (const std::size_t page : pages) (*request.outcomes)[page] = Code::kBusy;
}

}  // namespace tpusync::flash
