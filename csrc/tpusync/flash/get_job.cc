#include <fmt/format.h>

#include "tpusync/base/log.h"
#include "tpusync/flash/page_jobs.h"

namespace tpusync::flash {

using base::Code;
using base::Status;
using index::SlotId;

namespace {

class GetJob final : public IoJob {
 public:
  GetJob(Workshop& shop, PageRequest& request, std::span<const PinnedPage> pages)
      : shop_(shop), request_(request), pages_(pages), buffers_(pages.size()) {
    std::vector<SlotId> slots;
    for (const PinnedPage& page : pages) slots.push_back(page.slot.slot);
    stretches_ = stretches_of(slots, request.page_bytes, shop.space.region().slot_bytes());
    pieces_.resize(stretches_.size());
    begun_.resize(stretches_.size());
  }

  std::size_t size() const override { return stretches_.size(); }

  bool prepare(std::size_t i, Io& io) override {
    const Stretch stretch = stretches_[i];
    if (const Code code = check_start(shop_, request_, stretch.size()); code != Code::kOk) {
      for (std::size_t k = stretch.begin; k < stretch.end; ++k) finish(k, code);
      return false;
    }
    begun_[i] = shop_.clock.now();
    os::File& file = shop_.space.region().slots();
    for (std::size_t k = stretch.begin; k < stretch.end; ++k) {
      buffers_[k] = std::make_unique<PageBuffer>(request_.addresses_of(pages_[k].index), request_.lengths,
                                                 file, shop_.buffers);
      pieces_[i].insert(pieces_[i].end(), buffers_[k]->pieces().begin(), buffers_[k]->pieces().end());
    }
    io = {.is_write = false, .offset = offset_of(stretch.begin), .pieces = pieces_[i]};
    return true;
  }

  void complete(std::size_t i, Status status) override {
    const Stretch stretch = stretches_[i];
    const bool single = stretch.size() == 1;
    const bool slow = shop_.clock.now() - begun_[i] > shop_.latency_budget;
    status && !slow ? shop_.read_breaker.succeeded() : shop_.read_breaker.failed();
    for (std::size_t k = stretch.begin; k < stretch.end; ++k) {
      // One bad block must not cost its neighbours: each is asked for alone.
      take(k, status || single ? status : read_alone(k));
    }
  }

 private:
  std::uint64_t offset_of(std::size_t k) const {
    return shop_.space.region().slot_offset(pages_[k].slot.slot);
  }

  Status read_alone(std::size_t k) {
    const auto num_read = shop_.space.region().slots().read(buffers_[k]->pieces(), offset_of(k));
    if (!num_read) return tl::unexpected(num_read.error());
    if (*num_read >= request_.page_bytes) return {};
    return base::fail(Code::kIo, "the slot file ends within a slot");
  }

  void take(std::size_t k, const Status& status) {
    const Code code = verify(k, status);
    if (code == Code::kOk) {
      buffers_[k]->scatter();
      if (buffers_[k]->bounced()) shop_.counters.bounced.add();
      shop_.counters.hits.add();
      shop_.counters.get_bytes.add(request_.page_bytes);
    } else {
      shop_.counters.misses.add();
      shop_.space.drop(pages_[k].slot.slot, pages_[k].slot.generation);
    }
    buffers_[k].reset();
    finish(k, code);
  }

  Code verify(std::size_t k, const Status& status) {
    if (!status) {
      shop_.counters.io_errors.add();
      return Code::kIo;
    }
    const PinnedSlot& slot = pages_[k].slot;
    const std::uint64_t seed = payload_seed(request_.keys[pages_[k].index], slot.generation);
    if (buffers_[k]->checksum(seed) == slot.payload_checksum) return Code::kOk;
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

  void finish(std::size_t k, Code code) {
    shop_.space.unpin(pages_[k].slot.slot);
    (*request_.outcomes)[pages_[k].index] = code;
  }

  Workshop& shop_;
  PageRequest& request_;
  const std::span<const PinnedPage> pages_;
  std::vector<std::unique_ptr<PageBuffer>> buffers_;  // one per page, while it is under way
  std::vector<Stretch> stretches_;
  std::vector<std::vector<iovec>> pieces_;  // one per stretch
  std::vector<std::chrono::steady_clock::time_point> begun_;
};

}  // namespace

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
