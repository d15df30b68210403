#include "tpusync/device/copy_stream.h"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <utility>

#include "tpusync/layout/apply_nest.h"

namespace tpusync::device {

using base::Code;
using base::Result;
using base::Status;
using Time = std::chrono::steady_clock;

namespace {
constexpr std::uint64_t kRunBytesMin = std::uint64_t{32} << 10;  // cutting finer costs more than it balances
constexpr std::uint64_t kStreamingBytesMin = std::uint64_t{4} << 20;  // beyond what a core's caches keep
}  // namespace

// One copy or, without pieces, a marker.
struct CopyStream::Job {
  exec::TicketSource source;
  layout::PageCopyPlan plan;  // its items are pieces of about kPieceBytes over all layers and parts
  std::vector<Buffer> dst_buffers, src_buffers;
  layout::Stores stores = layout::Stores::kCached;
  std::vector<std::size_t> piece_begins;  // index of the first item of each piece, then the number of items
  // Hands out pieces. Relaxed: the queue of the executor orders the job's content before its workers.
  std::atomic<std::size_t> next_piece = 0;
  // Workers that may still touch bytes. Acquire-release: the last to leave has seen all that the others
  // wrote.
  std::atomic<int> workers_left = 0;

  std::size_t num_pieces() const { return piece_begins.empty() ? 0 : piece_begins.size() - 1; }
  void share_out();
  void run_pieces();
  void copy_piece(std::size_t piece) const;
  void copy_item(std::byte* dst, const std::byte* src, std::size_t item) const;
};

// Cuts the plan such that a piece holds about kPieceBytes when it is repeated for every layer and part.
void CopyStream::Job::share_out() {
  if (plan.num_items() == 0 || plan.num_layers == 0) return;
  const std::uint64_t repeats = plan.num_layers * plan.num_parts(dst_buffers.size());
  const std::uint64_t target = std::max(kRunBytesMin, kPieceBytes / std::max<std::uint64_t>(1, repeats));
  std::vector<layout::CopyRun> cut;
  cut.reserve(plan.runs.size());
  layout::cut_runs(plan.runs, target, cut);
  plan.runs = std::move(cut);
  const std::uint64_t total = plan.size_bytes_per_part * plan.num_parts(dst_buffers.size());
  if (total >= kStreamingBytesMin) stores = layout::Stores::kStreaming;
  std::uint64_t size = target;
  for (std::size_t i = 0; i < plan.num_items(); ++i) {
    if (size >= target) {
      piece_begins.push_back(i);
      size = 0;
    }
    size += plan.item_bytes(i);
  }
  piece_begins.push_back(plan.num_items());
}

void CopyStream::Job::run_pieces() {
  while (!source.cancel_requested()) {
    const std::size_t piece = next_piece.fetch_add(1, std::memory_order_relaxed);
    if (piece >= num_pieces()) return;
    copy_piece(piece);
  }
}

void CopyStream::Job::copy_piece(std::size_t piece) const {
  const bool src_per_layer = plan.src_layer_stride == 0, dst_per_layer = plan.dst_layer_stride == 0;
  for (std::uint64_t part = 0; part < plan.num_parts(dst_buffers.size()); ++part) {
    for (std::uint64_t i = 0; i < plan.num_layers; ++i) {
      const std::uint64_t layer = plan.first_layer + i;
      const Buffer& dst = dst_buffers[part * plan.dst_buffers_per_part + (dst_per_layer ? layer : 0)];
      const Buffer& src = src_buffers[part * plan.src_buffers_per_part + (src_per_layer ? layer : 0)];
      std::byte* to = dst.base + layer * plan.dst_layer_stride;
      const std::byte* from = src.base + layer * plan.src_layer_stride;
      for (std::size_t item = piece_begins[piece]; item < piece_begins[piece + 1]; ++item) {
        copy_item(to, from, item);
      }
    }
  }
  if (stores == layout::Stores::kStreaming) layout::streaming_fence();
}

void CopyStream::Job::copy_item(std::byte* dst, const std::byte* src, std::size_t item) const {
  if (plan.nests.empty()) return layout::copy_run(dst, src, plan.runs[item], stores);
  layout::apply_nest(dst, src, plan.nests[item], layout::best_shuffle_kernels(), stores);
}

namespace {

struct Extent {
  std::uint64_t begin, end;
};

Result<std::vector<Extent>> sorted_extents(std::span<const Buffer> buffers, const char* side) {
  std::vector<Extent> extents;
  extents.reserve(buffers.size());
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const auto begin = reinterpret_cast<std::uintptr_t>(buffers[i].base);
    if (begin == 0 || buffers[i].size_bytes > UINTPTR_MAX - begin) {
      return base::fail(Code::kInvalid,
                        fmt::format("page copy: {} buffer {} at {:#x} of {} bytes is no memory", side, i,
                                    begin, buffers[i].size_bytes));
    }
    extents.push_back({begin, begin + buffers[i].size_bytes});
  }
  std::ranges::sort(extents, {}, &Extent::begin);
  return extents;
}

Status overlap_error(const char* what, const Extent& a, const Extent& b) {
  return base::fail(Code::kInvalid, fmt::format("page copy: {} overlap, [{:#x}, {:#x}) and [{:#x}, {:#x})",
                                                what, a.begin, a.end, b.begin, b.end));
}

// Two destinations may lie within each other only where rows are apart: layers that share one allocation.
Status check_extents(const PageCopy& copy) {
  const auto dst = sorted_extents(copy.dst_buffers, "destination");
  if (!dst) return tl::unexpected(dst.error());
  const auto src = sorted_extents(copy.src_buffers, "source");
  if (!src) return tl::unexpected(src.error());
  const bool packed =
      copy.dst.tiles() || copy.dst.token_stride() == copy.dst.row_bytes() || copy.dst.buffers_per_part() == 1;
  for (std::size_t i = 1; packed && i < dst->size(); ++i) {
    if ((*dst)[i].begin < (*dst)[i - 1].end)
      return overlap_error("destination buffers", (*dst)[i - 1], (*dst)[i]);
  }
  std::size_t at = 0;
  for (const Extent& d : *dst) {
    while (at < src->size() && (*src)[at].end <= d.begin) ++at;
    for (std::size_t i = at; i < src->size() && (*src)[i].begin < d.end; ++i) {
      if ((*src)[i].end > d.begin) return overlap_error("a source and a destination", (*src)[i], d);
    }
  }
  return {};
}

std::vector<std::uint64_t> sizes_of(std::span<const Buffer> buffers) {
  std::vector<std::uint64_t> sizes;
  for (const Buffer& buffer : buffers) sizes.push_back(buffer.size_bytes);
  return sizes;
}

Result<layout::PageCopyPlan> plan_checked(const PageCopy& copy) {
  auto plan = layout::plan_page_copy(copy.dst, copy.src, copy.dst_slots, copy.src_slots, copy.layers);
  if (!plan) return plan;
  TPUSYNC_TRY(plan->check(sizes_of(copy.dst_buffers), sizes_of(copy.src_buffers)));
  TPUSYNC_TRY(check_extents(copy));
  return plan;
}

exec::Ticket refused(const exec::TicketSource& source, base::Error error) {
  source.finish_part(tl::unexpected(std::move(error)));
  return source.ticket();
}

}  // namespace

CopyStream::CopyStream(std::string name, exec::Executor& executor, std::shared_ptr<std::atomic<int>> num_open)
    : name_(std::move(name)), executor_(executor), num_open_(std::move(num_open)) {}

CopyStream::~CopyStream() {
  std::deque<std::shared_ptr<Job>> waiting;
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
    waiting.swap(queue_);
    changed_.notify_all();
    changed_.wait(lock, [this] { return rests_; });
  }
  if (pause_timer_.joinable()) {
    pause_timer_.request_stop();
    pause_timer_.join();
  }
  for (const auto& job : waiting)
    refused(job->source, {Code::kCancelled, fmt::format("stream {} was closed", name_)});
  num_open_->fetch_sub(1, std::memory_order_relaxed);
}

exec::Ticket CopyStream::submit_copy(const PageCopy& copy) {
  auto job = std::make_shared<Job>();
  auto plan = plan_checked(copy);
  if (!plan) return refused(job->source, std::move(plan).error());
  job->plan = *std::move(plan);
  job->dst_buffers.assign(copy.dst_buffers.begin(), copy.dst_buffers.end());
  job->src_buffers.assign(copy.src_buffers.begin(), copy.src_buffers.end());
  job->share_out();
  return submit(std::move(job));
}

exec::Ticket CopyStream::submit_marker() {
  return submit(std::make_shared<Job>());
}

exec::Ticket CopyStream::submit(std::shared_ptr<Job> job) {
  exec::Ticket ticket = job->source.ticket();
  {
    std::unique_lock lock(mutex_);
    if (closing_ || queue_.size() >= kQueueLimit) {
      const std::size_t num_waiting = queue_.size();
      lock.unlock();
      return refused(job->source,
                     {Code::kBusy, fmt::format("stream {}: {} copies wait, the limit", name_, num_waiting)});
    }
    queue_.push_back(std::move(job));
    if (!rests_ || Time::now() < pause_until_) return ticket;
    rests_ = false;
  }
  advance();
  return ticket;
}

// The next job to run; null when there is none now, and then the stream rests.
std::shared_ptr<CopyStream::Job> CopyStream::next_or_rest() {
  std::lock_guard lock(mutex_);
  if (closing_ || queue_.empty() || Time::now() < pause_until_) {
    rests_ = true;
    changed_.notify_all();
    return nullptr;
  }
  auto job = std::move(queue_.front());
  queue_.pop_front();
  return job;
}

// Called by whoever set rests_ to false: goes through the queue until a job is under way on other threads.
void CopyStream::advance() {
  while (const auto job = next_or_rest()) {
    if (begin(job)) return;
  }
}

// False when the job is done already. Else the last worker to leave it calls advance().
bool CopyStream::begin(const std::shared_ptr<Job>& job) {
  if (!job->source.start()) {
    refused(job->source, {Code::kCancelled, "the copy was cancelled before it started"});
    return false;
  }
  if (job->num_pieces() == 0) {
    job->source.finish_part({});
    return false;
  }
  const int num_workers = static_cast<int>(std::min<std::size_t>(executor_.num_threads(), job->num_pieces()));
  // One count is ours, so that no worker ends the job while others are still being sent.
  job->workers_left.store(num_workers + 1, std::memory_order_relaxed);
  for (int i = 0; i < num_workers; ++i) {
    const Status sent = executor_.submit([this, job] {
      job->run_pieces();
      if (leave(job)) advance();
    });
    if (!sent) job->workers_left.fetch_sub(1, std::memory_order_acq_rel);
  }
  return !leave(job);
}

// True for the last one to leave, who has ended the job.
bool CopyStream::leave(const std::shared_ptr<Job>& job) {
  if (job->workers_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
  Status status;
  if (job->next_piece.load(std::memory_order_relaxed) < job->num_pieces()) {
    status = job->source.cancel_requested() ? base::fail(Code::kCancelled, "the copy was cancelled")
                                            : base::fail(Code::kBusy, "the executor took no job");
  }
  job->source.finish_part(std::move(status));
  return true;
}

void CopyStream::pause(std::chrono::nanoseconds duration) {
  std::lock_guard lock(mutex_);
  pause_until_ = Time::now() + std::chrono::duration_cast<Time::duration>(duration);
  changed_.notify_all();
  if (!pause_timer_.joinable())
    pause_timer_ = std::jthread([this](std::stop_token stop) { resume_after_pause(stop); });
}

void CopyStream::resume_after_pause(std::stop_token stop) {
  pthread_setname_np(pthread_self(), "copy-pause");
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    const Time::time_point until = pause_until_;
    if (Time::now() < until) {
      changed_.wait_until(lock, stop, until, [&] { return pause_until_ != until; });
    } else if (rests_ && !queue_.empty()) {
      rests_ = false;
      lock.unlock();
      advance();
      lock.lock();
    } else {
      changed_.wait(lock, stop, [&] { return pause_until_ != until; });
    }
  }
}

}  // namespace tpusync::device
