// A disk in memory that fails on command or from a seed: the file seam's fake.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tpusync/base/clock.h"
#include "tpusync/base/prng.h"
#include "tpusync/os/file.h"

namespace tpusync::testing {

// Faults hit transfers of files whose path ends in `path_suffix`. A rate of N means once in N transfers on
// average, 0 never.
struct SimFaults {
  std::string path_suffix;
  std::uint64_t read_error_1_in = 0;
  std::uint64_t write_error_1_in = 0;
  std::uint64_t torn_write_1_in = 0;           // a prefix is written, success is reported
  std::uint64_t misdirected_write_1_in = 0;    // goes to another 4 KiB place of the file, success is reported
  std::uint64_t bit_rot_1_in = 0;              // a bit of what a read touches flips for good
  std::vector<std::uint64_t> bad_blocks = {};  // numbers of 4 KiB blocks whose reads fail
  std::chrono::microseconds latency{0};
};

// Thread-safe.
class SimDisk final : public os::FileSystem {
 public:
  struct Options {
    std::uint64_t seed = 1;
    std::uint64_t total_bytes = std::uint64_t{1} << 30;
    std::size_t direct_align_bytes = 0;  // 0: no direct transfers; else misaligned ones are errors
    bool in_memory = false;              // says of itself that it is a tmpfs
    bool read_only = false;
    class SimClock* clock = nullptr;  // latency turns it, if there is one, and is slept otherwise
  };
  explicit SimDisk(Options options);
  ~SimDisk() override;

  void set_faults(SimFaults faults);
  void set_available_bytes(std::uint64_t bytes);  // as if others had filled or emptied the disk
  void set_read_only(bool read_only);
  void set_owner(const std::string& path, std::uint32_t owner);
  // What a power cut leaves: of everything not synced, each write survives whole, in part (by sectors) or
  // not. Files must be closed.
  void power_cut();
  // The bytes of a file, for tests that damage them.
  std::vector<std::byte> bytes(const std::string& path);
  void flip(const std::string& path, std::uint64_t offset, std::byte mask);
  std::uint64_t num_faults() const;

  base::Result<std::unique_ptr<os::File>> open(const std::string& path, os::OpenMode mode) override;
  base::Result<os::FileInfo> info(const std::string& path) override;
  base::Result<std::vector<std::string>> list(const std::string& path) override;
  base::Status make_directory(const std::string& path, std::uint32_t mode) override;
  base::Status remove(const std::string& path) override;
  base::Status rename(const std::string& from, const std::string& to) override;
  base::Result<os::SpaceInfo> space(const std::string& path) override;
  std::uint32_t user() const override { return kUser; }
  static constexpr std::uint32_t kUser = 1000;

 private:
  struct Node;
  class OpenFile;
  enum class Fault { kNone, kError, kTorn, kMisdirected, kRot };

  std::uint64_t used_bytes() const;
  std::uint64_t available_bytes() const;
  Fault draw_fault(const std::string& path, bool is_write);
  bool touches_bad_block(const std::string& path, std::span<const iovec> pieces, std::uint64_t offset);

  const Options options_;
  mutable std::mutex mutex_;
  base::Prng prng_;
  SimFaults faults_;
  std::uint64_t num_faults_ = 0;
  std::uint64_t taken_by_others_ = 0;
  bool read_only_ = false;
  std::uint64_t last_inode_ = 0;
  std::map<std::string, std::shared_ptr<Node>> nodes_;
};

// A clock that stands until it is turned. Thread-safe.
class SimClock final : public base::Clock {
 public:
  std::chrono::steady_clock::time_point now() const override;
  std::int64_t unix_ns() const override;
  void advance(std::chrono::nanoseconds by);

 private:
  mutable std::mutex mutex_;
  std::chrono::nanoseconds passed_{0};
};

}  // namespace tpusync::testing
