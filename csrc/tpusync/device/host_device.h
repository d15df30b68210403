// A device whose HBM is ordinary memory: SGLang's --device cpu.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "tpusync/base/error.h"
#include "tpusync/device/copy_stream.h"
#include "tpusync/exec/executor.h"

namespace tpusync::device {

// A resource. Thread-safe. Must outlive the streams it opened; the destructor joins its threads.
class HostDevice {
 public:
  static constexpr int kNumStreamsMax = 64;

  // kInvalid unless num_threads is 1 to 256. The threads serve all streams of the device.
  static base::Result<std::unique_ptr<HostDevice>> open(int num_threads);

  HostDevice(const HostDevice&) = delete;
  HostDevice& operator=(const HostDevice&) = delete;

  // kExhausted when kNumStreamsMax streams are open.
  base::Result<std::unique_ptr<CopyStream>> open_stream(std::string name);

 private:
  explicit HostDevice(std::unique_ptr<exec::Executor> executor);

  // Relaxed everywhere: a count, ordering nothing. Shared because a stream gives its place back when it is
  // gone.
  const std::shared_ptr<std::atomic<int>> num_streams_ = std::make_shared<std::atomic<int>>(0);
  const std::unique_ptr<exec::Executor> executor_;
};

}  // namespace tpusync::device
