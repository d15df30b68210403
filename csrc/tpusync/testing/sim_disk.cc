#include "tpusync/testing/sim_disk.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "tpusync/base/bytes.h"

namespace tpusync::testing {

using base::Code;
using base::Result;
using base::Status;

namespace {

constexpr std::uint64_t kBlockBytes = 4096;
constexpr std::uint64_t kSectorBytes = 512;
constexpr std::int64_t kEpochUnixNs = 1'800'000'000'000'000'000;

std::string parent_of(const std::string& path) {
  return path.substr(0, path.rfind('/'));
}

bool ends_with(const std::string& path, const std::string& suffix) {
  return path.size() >= suffix.size() &&
         path.compare(path.size() - suffix.size(), suffix.size(), suffix) == 0;
}

void apply(std::vector<std::byte>& bytes, std::uint64_t offset, std::span<const std::byte> data) {
  if (bytes.size() < offset + data.size()) bytes.resize(offset + data.size());
  std::copy(data.begin(), data.end(), bytes.begin() + static_cast<std::ptrdiff_t>(offset));
}

}  // namespace

struct SimDisk::Node {
  struct Write {
    std::uint64_t offset;
    std::vector<std::byte> data;
  };
  bool is_directory = false;
  std::uint64_t inode = 0;
  std::uint32_t owner = kUser;
  std::uint32_t mode = 0;
  std::int64_t modified = 0;
  const void* locked_by = nullptr;
  std::vector<std::byte> bytes;    // what a read sees
  std::vector<std::byte> durable;  // what is on the medium
  std::vector<Write> unsynced;

  std::uint64_t disk_bytes() const {
    return is_directory ? kBlockBytes : base::round_up(bytes.size(), kBlockBytes);
  }
};

class SimDisk::OpenFile final : public os::File {
 public:
  OpenFile(SimDisk& disk, std::string path, std::shared_ptr<Node> node, bool direct)
      : disk_(disk), path_(std::move(path)), node_(std::move(node)), direct_(direct) {}
  ~OpenFile() override { unlock(); }

  Result<std::size_t> read(std::span<const iovec> pieces, std::uint64_t offset) const override {
    std::unique_lock lock(disk_.mutex_);
    TPUSYNC_TRY(check_alignment(pieces, offset));
    const Fault fault = disk_.draw_fault(path_, false);
    const bool bad = disk_.touches_bad_block(path_, pieces, offset);
    pause(lock);
    if (bad || fault == Fault::kError) return base::fail_errno(fmt::format("read {}", path_), EIO);
    std::size_t num_read = 0;
    for (const iovec& piece : pieces) {
      const std::uint64_t begin = std::min<std::uint64_t>(offset + num_read, node_->bytes.size());
      const std::uint64_t length = std::min<std::uint64_t>(piece.iov_len, node_->bytes.size() - begin);
      if (fault == Fault::kRot && length > 0 && num_read == 0) {
        node_->bytes[begin + disk_.prng_.below(length)] ^= std::byte{1} << disk_.prng_.below(8);
      }
      if (length > 0) std::memcpy(piece.iov_base, node_->bytes.data() + begin, length);
      num_read += length;
    }
    return num_read;
  }

  Status write(std::span<const iovec> pieces, std::uint64_t offset) override {
    std::vector<std::byte> data;
    for (const iovec& piece : pieces) {
      const auto* from = static_cast<const std::byte*>(piece.iov_base);
      data.insert(data.end(), from, from + piece.iov_len);
    }
    std::unique_lock lock(disk_.mutex_);
    TPUSYNC_TRY(check_alignment(pieces, offset));
    if (disk_.read_only_) return base::fail_errno(fmt::format("write {}", path_), EROFS);
    const Fault fault = disk_.draw_fault(path_, true);
    pause(lock);
    if (fault == Fault::kError) return base::fail_errno(fmt::format("write {}", path_), EIO);
    if (fault == Fault::kTorn) data.resize(disk_.prng_.below(data.size() + 1));
    if (fault == Fault::kMisdirected) {
      offset = disk_.prng_.below(base::round_up(node_->bytes.size() + 1, kBlockBytes) / kBlockBytes) *
                   kBlockBytes +
               offset % kBlockBytes;
    }
    const std::uint64_t end = offset + data.size();
    if (end > node_->bytes.size()) TPUSYNC_TRY(check_room(end));
    apply(node_->bytes, offset, data);
    node_->unsynced.push_back({offset, std::move(data)});
    node_->modified = kEpochUnixNs + static_cast<std::int64_t>(++disk_.last_inode_);
    return {};
  }

  Status allocate(std::uint64_t size_bytes) override {
    std::lock_guard lock(disk_.mutex_);
    if (disk_.read_only_) return base::fail_errno(fmt::format("allocate {}", path_), EROFS);
    if (size_bytes <= node_->bytes.size()) return {};
    TPUSYNC_TRY(check_room(size_bytes));
    node_->bytes.resize(size_bytes);
    node_->durable.resize(size_bytes);
    return {};
  }

  Status truncate(std::uint64_t size_bytes) override {
    std::lock_guard lock(disk_.mutex_);
    if (disk_.read_only_) return base::fail_errno(fmt::format("truncate {}", path_), EROFS);
    settle();
    node_->bytes.resize(size_bytes);
    node_->durable.resize(size_bytes);
    return {};
  }

  Status sync() override {
    std::lock_guard lock(disk_.mutex_);
    if (disk_.draw_fault(path_, true) == Fault::kError)
      return base::fail_errno(fmt::format("sync {}", path_), EIO);
    settle();
    return {};
  }

  Result<os::FileInfo> info() const override {
    std::lock_guard lock(disk_.mutex_);
    return info_of(*node_);
  }

  Result<bool> try_lock() override {
    std::lock_guard lock(disk_.mutex_);
    if (node_->locked_by != nullptr && node_->locked_by != this) return false;
    node_->locked_by = this;
    return true;
  }
  void unlock() override {
    std::lock_guard lock(disk_.mutex_);
    if (node_->locked_by == this) node_->locked_by = nullptr;
  }

  bool direct() const override { return direct_; }
  std::size_t direct_align_bytes() const override { return direct_ ? disk_.options_.direct_align_bytes : 1; }

  static os::FileInfo info_of(const Node& node) {
    return {.is_directory = node.is_directory,
            .size_bytes = node.bytes.size(),
            .disk_bytes = node.disk_bytes(),
            .inode = node.inode,
            .owner = node.owner,
            .mode = node.mode,
            .modified_unix_ns = node.modified};
  }

 private:
  void settle() {
    node_->durable = node_->bytes;
    node_->unsynced.clear();
  }

  Status check_room(std::uint64_t size_bytes) const {
    const std::uint64_t more =
        base::round_up(size_bytes, kBlockBytes) - base::round_up(node_->bytes.size(), kBlockBytes);
    if (more <= disk_.available_bytes()) return {};
    return base::fail_errno(fmt::format("write {}", path_), ENOSPC);
  }

  Status check_alignment(std::span<const iovec> pieces, std::uint64_t offset) const {
    const std::uint64_t align = direct_align_bytes();
    bool aligned = base::is_aligned(offset, align);
    for (const iovec& piece : pieces) {
      aligned = aligned &&
                base::is_aligned(reinterpret_cast<std::uintptr_t>(piece.iov_base) | piece.iov_len, align);
    }
    if (aligned) return {};
    return base::fail_errno(fmt::format("direct transfer of {} at {}", path_, offset), EINVAL);
  }

  void pause(std::unique_lock<std::mutex>& lock) const {
    const auto latency = disk_.faults_.latency;
    if (latency.count() == 0 || !ends_with(path_, disk_.faults_.path_suffix)) return;
    if (disk_.options_.clock != nullptr) return disk_.options_.clock->advance(latency);
    lock.unlock();
    std::this_thread::sleep_for(latency);
    lock.lock();
  }

  SimDisk& disk_;
  const std::string path_;
  const std::shared_ptr<Node> node_;
  const bool direct_;
};

SimDisk::SimDisk(Options options) : options_(options), prng_(options.seed), read_only_(options.read_only) {
  auto root = std::make_shared<Node>();
  root->is_directory = true;
  nodes_[""] = root;
}
SimDisk::~SimDisk() = default;

void SimDisk::set_faults(SimFaults faults) {
  std::lock_guard lock(mutex_);
  faults_ = std::move(faults);
}

void SimDisk::set_available_bytes(std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  taken_by_others_ = options_.total_bytes - used_bytes() - bytes;
}

void SimDisk::set_read_only(bool read_only) {
  std::lock_guard lock(mutex_);
  read_only_ = read_only;
}

void SimDisk::set_owner(const std::string& path, std::uint32_t owner) {
  std::lock_guard lock(mutex_);
  nodes_.at(path)->owner = owner;
}

void SimDisk::power_cut() {
  std::lock_guard lock(mutex_);
  for (auto& [path, node] : nodes_) {
    for (const Node::Write& write : node->unsynced) {
      const bool torn = prng_.one_in(4);
      if (!torn && prng_.one_in(2)) continue;
      for (std::uint64_t done = 0; done < write.data.size(); done += kSectorBytes) {
        const std::size_t length = std::min<std::size_t>(kSectorBytes, write.data.size() - done);
        if (torn && prng_.one_in(2)) continue;
        apply(node->durable, write.offset + done, std::span(write.data).subspan(done, length));
      }
    }
    node->durable.resize(node->bytes.size());
    node->bytes = node->durable;
    node->unsynced.clear();
    node->locked_by = nullptr;
  }
}

std::vector<std::byte> SimDisk::bytes(const std::string& path) {
  std::lock_guard lock(mutex_);
  return nodes_.at(path)->bytes;
}

void SimDisk::flip(const std::string& path, std::uint64_t offset, std::byte mask) {
  std::lock_guard lock(mutex_);
  nodes_.at(path)->bytes.at(offset) ^= mask;
}

std::uint64_t SimDisk::num_faults() const {
  std::lock_guard lock(mutex_);
  return num_faults_;
}

std::uint64_t SimDisk::used_bytes() const {
  std::uint64_t used = 0;
  for (const auto& [path, node] : nodes_) used += node->disk_bytes();
  return used;
}

std::uint64_t SimDisk::available_bytes() const {
  const std::uint64_t taken = used_bytes() + taken_by_others_;
  return options_.total_bytes - std::min(options_.total_bytes, taken);
}

SimDisk::Fault SimDisk::draw_fault(const std::string& path, bool is_write) {
  if (!ends_with(path, faults_.path_suffix)) return Fault::kNone;
  const auto drawn = [&](std::uint64_t one_in) { return one_in > 0 && prng_.one_in(one_in); };
  Fault fault = Fault::kNone;
  if (is_write) {
    if (drawn(faults_.write_error_1_in)) fault = Fault::kError;
    if (drawn(faults_.torn_write_1_in)) fault = Fault::kTorn;
    if (drawn(faults_.misdirected_write_1_in)) fault = Fault::kMisdirected;
  } else {
    if (drawn(faults_.read_error_1_in)) fault = Fault::kError;
    if (drawn(faults_.bit_rot_1_in)) fault = Fault::kRot;
  }
  num_faults_ += fault != Fault::kNone;
  return fault;
}

bool SimDisk::touches_bad_block(const std::string& path, std::span<const iovec> pieces,
                                std::uint64_t offset) {
  if (faults_.bad_blocks.empty() || !ends_with(path, faults_.path_suffix)) return false;
  std::uint64_t end = offset;
  for (const iovec& piece : pieces) end += piece.iov_len;
  const bool bad = std::any_of(
      faults_.bad_blocks.begin(), faults_.bad_blocks.end(),
      [&](std::uint64_t block) { return block * kBlockBytes < end && offset < (block + 1) * kBlockBytes; });
  num_faults_ += bad;
  return bad;
}

Result<std::unique_ptr<os::File>> SimDisk::open(const std::string& path, os::OpenMode mode) {
  std::lock_guard lock(mutex_);
  auto found = nodes_.find(path);
  if (found == nodes_.end()) {
    if (!mode.create) return base::fail(Code::kNotFound, fmt::format("open {}: no such file", path));
    if (read_only_) return base::fail_errno(fmt::format("open {}", path), EROFS);
    if (!nodes_.contains(parent_of(path))) return base::fail(Code::kNotFound, fmt::format("open {}", path));
    auto node = std::make_shared<Node>();
    node->inode = ++last_inode_;
    node->modified = kEpochUnixNs + static_cast<std::int64_t>(last_inode_);
    found = nodes_.emplace(path, std::move(node)).first;
  }
  if (mode.write && read_only_) return base::fail_errno(fmt::format("open {}", path), EROFS);
  const bool direct = mode.direct && options_.direct_align_bytes > 0;
  return std::make_unique<OpenFile>(*this, path, found->second, direct);
}

Result<os::FileInfo> SimDisk::info(const std::string& path) {
  std::lock_guard lock(mutex_);
  const auto found = nodes_.find(path);
  if (found == nodes_.end()) return base::fail(Code::kNotFound, fmt::format("stat {}: no such file", path));
  return OpenFile::info_of(*found->second);
}

Result<std::vector<std::string>> SimDisk::list(const std::string& path) {
  std::lock_guard lock(mutex_);
  if (!nodes_.contains(path))
    return base::fail(Code::kNotFound, fmt::format("list {}: no such directory", path));
  std::vector<std::string> names;
  for (const auto& [name, node] : nodes_) {
    if (!name.empty() && parent_of(name) == path) names.push_back(name.substr(path.size() + 1));
  }
  return names;
}

Status SimDisk::make_directory(const std::string& path, std::uint32_t mode) {
  std::lock_guard lock(mutex_);
  for (std::size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string part = path.substr(0, end);
    if (!nodes_.contains(part)) {
      if (read_only_) return base::fail_errno(fmt::format("make directory {}", part), EROFS);
      auto node = std::make_shared<Node>();
      node->is_directory = true;
      node->mode = mode;
      node->inode = ++last_inode_;
      nodes_.emplace(part, std::move(node));
    }
    if (end == std::string::npos) return {};
  }
}

Status SimDisk::remove(const std::string& path) {
  std::lock_guard lock(mutex_);
  if (nodes_.erase(path) == 0)
    return base::fail(Code::kNotFound, fmt::format("remove {}: no such file", path));
  return {};
}

Status SimDisk::rename(const std::string& from, const std::string& to) {
  std::lock_guard lock(mutex_);
  const auto found = nodes_.find(from);
  if (found == nodes_.end()) return base::fail(Code::kNotFound, fmt::format("rename {}: no such file", from));
  nodes_[to] = found->second;
  nodes_.erase(from);
  return {};
}

Result<os::SpaceInfo> SimDisk::space(const std::string&) {
  std::lock_guard lock(mutex_);
  return os::SpaceInfo{.total_bytes = options_.total_bytes,
                       .available_bytes = available_bytes(),
                       .in_memory = options_.in_memory,
                       .read_only = read_only_};
}

std::chrono::steady_clock::time_point SimClock::now() const {
  std::lock_guard lock(mutex_);
  return std::chrono::steady_clock::time_point(
      std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::hours(1) + passed_));
}

std::int64_t SimClock::unix_ns() const {
  std::lock_guard lock(mutex_);
  return kEpochUnixNs + passed_.count();
}

void SimClock::advance(std::chrono::nanoseconds by) {
  std::lock_guard lock(mutex_);
  passed_ += by;
}

}  // namespace tpusync::testing
