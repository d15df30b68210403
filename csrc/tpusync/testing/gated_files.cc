#include "tpusync/testing/gated_files.h"

namespace tpusync::testing {

using base::Result;
using base::Status;

class GatedFiles::GatedFile final : public os::File {
 public:
  GatedFile(GatedFiles& gate, std::unique_ptr<os::File> file) : gate_(gate), file_(std::move(file)) {}

  Result<std::size_t> read(std::span<const iovec> pieces, std::uint64_t offset) const override {
    gate_.pass();
    return file_->read(pieces, offset);
  }
  Status write(std::span<const iovec> pieces, std::uint64_t offset) override {
    return file_->write(pieces, offset);
  }
  Status allocate(std::uint64_t size_bytes) override { return file_->allocate(size_bytes); }
  Status truncate(std::uint64_t size_bytes) override { return file_->truncate(size_bytes); }
  Status sync() override { return file_->sync(); }
  Result<os::FileInfo> info() const override { return file_->info(); }
  Result<bool> try_lock() override { return file_->try_lock(); }
  void unlock() override { file_->unlock(); }
  bool direct() const override { return file_->direct(); }
  std::size_t direct_align_bytes() const override { return file_->direct_align_bytes(); }

 private:
  GatedFiles& gate_;
  const std::unique_ptr<os::File> file_;
};

void GatedFiles::close() {
  std::lock_guard lock(mutex_);
  open_ = false;
}

void GatedFiles::open() {
  std::lock_guard lock(mutex_);
  open_ = true;
  changed_.notify_all();
}

void GatedFiles::wait_for_readers() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return num_waiting_ > 0; });
}

void GatedFiles::pass() {
  std::unique_lock lock(mutex_);
  if (open_) return;
  ++num_waiting_;
  changed_.notify_all();
  changed_.wait(lock, [this] { return open_; });
  --num_waiting_;
}

Result<std::unique_ptr<os::File>> GatedFiles::open(const std::string& path, os::OpenMode mode) {
  Result<std::unique_ptr<os::File>> file = files_.open(path, mode);
  if (!file) return file;
  return std::make_unique<GatedFile>(*this, std::move(*file));
}

}  // namespace tpusync::testing
