// Files whose reads wait at a gate: what happens during a read becomes a test without sleeps.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "tpusync/os/file.h"

namespace tpusync::testing {

// Thread-safe. `files` outlives it. The gate is open at first.
class GatedFiles final : public os::FileSystem {
 public:
  explicit GatedFiles(os::FileSystem& files) : files_(files) {}

  void close();
  void open();
  // Until a read waits at the gate.
  void wait_for_readers();

  base::Result<std::unique_ptr<os::File>> open(const std::string& path, os::OpenMode mode) override;
  base::Result<os::FileInfo> info(const std::string& path) override { return files_.info(path); }
  base::Result<std::vector<std::string>> list(const std::string& path) override { return files_.list(path); }
  base::Status make_directory(const std::string& path, std::uint32_t mode) override {
    return files_.make_directory(path, mode);
  }
  base::Status remove(const std::string& path) override { return files_.remove(path); }
  base::Status rename(const std::string& from, const std::string& to) override {
    return files_.rename(from, to);
  }
  base::Result<os::SpaceInfo> space(const std::string& path) override { return files_.space(path); }
  std::uint32_t user() const override { return files_.user(); }

 private:
  class GatedFile;
  void pass();

  os::FileSystem& files_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
  int num_waiting_ = 0;
};

}  // namespace tpusync::testing
