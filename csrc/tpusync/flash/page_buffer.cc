#include "tpusync/flash/page_buffer.h"

#include <algorithm>
#include <cstring>

#include "tpusync/base/bytes.h"
#include "tpusync/base/checksum.h"

namespace tpusync::flash {

namespace {

std::span<const std::byte> bytes_of(const iovec& piece) {
  return {static_cast<const std::byte*>(piece.iov_base), piece.iov_len};
}

}  // namespace

os::AlignedBuffer BufferPool::acquire() {
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      os::AlignedBuffer buffer = std::move(free_.back());
      free_.pop_back();
      return buffer;
    }
  }
  return os::AlignedBuffer(buffer_bytes_);
}

void BufferPool::release(os::AlignedBuffer buffer) {
  std::lock_guard lock(mutex_);
  free_.push_back(std::move(buffer));
}

PageBuffer::PageBuffer(std::span<const std::uint64_t> addresses, std::span<const std::uint64_t> lengths,
                       const os::File& file, BufferPool& pool)
    : pool_(&pool) {
  const std::size_t align = file.direct_align_bytes();
  bool aligned = true;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] == 0) continue;
    caller_.push_back({reinterpret_cast<void*>(addresses[i]), lengths[i]});
    page_bytes_ += lengths[i];
    aligned = aligned && base::is_aligned(addresses[i] | lengths[i], align);
  }
  if (aligned) {
    pieces_ = caller_;
    return;
  }
  bounce_ = pool.acquire();
  const std::size_t length = base::round_up(page_bytes_, align);
  pieces_.push_back({bounce_->bytes().data(), length});
  const auto padding = bounce_->bytes().subspan(page_bytes_, length - page_bytes_);
  std::fill(padding.begin(), padding.end(), std::byte{0});
}

PageBuffer::~PageBuffer() {
  if (bounce_) pool_->release(std::move(*bounce_));
}

void PageBuffer::gather() {
  if (!bounce_) return;
  std::byte* to = bounce_->bytes().data();
  for (const iovec& piece : caller_) {
    std::memcpy(to, piece.iov_base, piece.iov_len);
    to += piece.iov_len;
  }
}

void PageBuffer::scatter() {
  if (!bounce_) return;
  const std::byte* from = bounce_->bytes().data();
  for (const iovec& piece : caller_) {
    std::memcpy(piece.iov_base, from, piece.iov_len);
    from += piece.iov_len;
  }
}

std::uint64_t PageBuffer::checksum(std::uint64_t seed) const {
  if (bounce_) return base::checksum64(bounce_->bytes().first(page_bytes_), seed);
  if (pieces_.size() == 1) return base::checksum64(bytes_of(pieces_.front()), seed);
  base::Checksum sum(seed);
  for (const iovec& piece : pieces_) sum.update(bytes_of(piece));
  return sum.value();
}

}  // namespace tpusync::flash
