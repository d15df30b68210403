#include "tpusync/device/host_device.h"

#include <fmt/format.h>

#include <utility>

namespace tpusync::device {

using base::Code;
using base::Result;

Result<std::unique_ptr<HostDevice>> HostDevice::open(int num_threads) {
  // Every stream runs one copy at a time and sends at most one job per thread, so the queue has room for all.
  const std::size_t queue_limit =
      static_cast<std::size_t>(kNumStreamsMax) * (num_threads > 0 ? num_threads : 1);
  auto executor =
      exec::Executor::open({.name = "copy", .num_threads = num_threads, .queue_limit = queue_limit});
  if (!executor) return tl::unexpected(std::move(executor).error());
  return std::unique_ptr<HostDevice>(new HostDevice(*std::move(executor)));
}

HostDevice::HostDevice(std::unique_ptr<exec::Executor> executor) : executor_(std::move(executor)) {}

Result<std::unique_ptr<CopyStream>> HostDevice::open_stream(std::string name) {
  if (num_streams_->fetch_add(1, std::memory_order_relaxed) >= kNumStreamsMax) {
    num_streams_->fetch_sub(1, std::memory_order_relaxed);
    return base::fail(Code::kExhausted,
                      fmt::format("stream {}: {} streams are open, the limit", name, kNumStreamsMax));
  }
  return std::make_unique<CopyStream>(std::move(name), *executor_, num_streams_);
}

}  // namespace tpusync::device
