#include "tpusync/os/mapping.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "tpusync/base/bytes.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace tpusync::os {

using base::Code;
using base::Result;
using base::Status;

namespace {

// Bases are aligned for the largest page that a tmpfs mapping may get without being asked for.
constexpr std::uint64_t kBaseAlignBytes = 2 * base::kMiB;
constexpr int kMpolPreferred = 1;
constexpr int kNodeMax = 63;

Status check_ranges(const SharedFile& file, std::span<const Mapping::Range> ranges) {
  const Result<SharedFile::Info> info = file.info();
  if (!info) return tl::unexpected(info.error());
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const auto [offset, size_bytes] = ranges[i];
    const bool aligned = base::is_aligned(offset, info->map_align_bytes) &&
                         (i + 1 == ranges.size() || base::is_aligned(size_bytes, info->map_align_bytes));
    if (!aligned || size_bytes == 0) {
      return base::fail(Code::kInvalid, fmt::format("{}: {} bytes at {} are not aligned to {}", file.path(),
                                                    size_bytes, offset, info->map_align_bytes));
    }
    if (offset > info->size_bytes || size_bytes > info->size_bytes - offset) {
      return base::fail(Code::kInvalid, fmt::format("{}: {} bytes at {} end beyond the {} bytes of the file",
                                                    file.path(), size_bytes, offset, info->size_bytes));
    }
  }
  return {};
}

// MADV_POPULATE_* of Linux before 5.14: nothing is checked, every page is touched.
void touch_pages(std::byte* from, std::uint64_t size_bytes, bool write) {
  const long page_bytes = ::sysconf(_SC_PAGESIZE);
  for (std::uint64_t at = 0; at < size_bytes; at += static_cast<std::uint64_t>(page_bytes)) {
    auto* const word = reinterpret_cast<volatile unsigned char*>(from + at);
    const unsigned char value = *word;
    if (write) *word = value;
  }
}

}  // namespace

Result<std::unique_ptr<Mapping>> Mapping::open(const SharedFile& file, std::span<const Range> ranges,
                                               bool write) {
  TPUSYNC_TRY(check_ranges(file, ranges));
  std::uint64_t total_bytes = 0;
  for (const Range& range : ranges) total_bytes += range.size_bytes;
  const std::uint64_t align_bytes = std::max(kBaseAlignBytes, file.info()->map_align_bytes);
  const std::uint64_t reserved_bytes = base::round_up(total_bytes, align_bytes) + align_bytes;
  void* const reserved =
      ::mmap(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED)
    return base::fail_errno(fmt::format("reserve {} bytes of addresses", reserved_bytes), errno);
  const std::uint64_t start = base::round_up(reinterpret_cast<std::uint64_t>(reserved), align_bytes);
  std::byte* const base = reinterpret_cast<std::byte*>(start);
  std::unique_ptr<Mapping> mapping(
      new Mapping({base, total_bytes}, {static_cast<std::byte*>(reserved), reserved_bytes}, write));
  std::byte* at = base;
  for (const Range& range : ranges) {
    void* const mapped =
        ::mmap(at, range.size_bytes, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED | MAP_FIXED,
               file.descriptor(), static_cast<off_t>(range.file_offset));
    if (mapped == MAP_FAILED) return base::fail_errno(fmt::format("map {}", file.path()), errno);
    // Advice: without it a tmpfs mapping has small pages. A kernel that cannot do it says so, and that is
    // fine.
    ::madvise(mapped, range.size_bytes, MADV_HUGEPAGE);
    ::madvise(mapped, range.size_bytes, MADV_DONTDUMP);
    at += range.size_bytes;
  }
  return mapping;
}

Mapping::~Mapping() {
  ::munmap(reserved_.data(), reserved_.size());
}

Status Mapping::prefer_node(int node) const {
  if (node < 0 || node > kNodeMax) {
    return base::fail(Code::kInvalid, fmt::format("NUMA node {}: allowed are 0 to {}", node, kNodeMax));
  }
  const unsigned long mask = 1ul << node;
  if (::syscall(SYS_mbind, bytes_.data(), bytes_.size(), kMpolPreferred, &mask, kNodeMax + 2, 0) == 0)
    return {};
  if (errno == ENOSYS || errno == EINVAL || errno == EPERM) {
    return base::fail(Code::kUnsupported, fmt::format("memory cannot be placed on NUMA node {}", node));
  }
  return base::fail_errno("mbind", errno);
}

Status Mapping::populate(std::uint64_t offset, std::uint64_t size_bytes) const {
  const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t begin = offset & ~(page_bytes - 1);
  const std::uint64_t end =
      std::min(base::round_up(offset + size_bytes, page_bytes), base::round_up(bytes_.size(), page_bytes));
  if (begin >= end) return {};
  const int advice = write_ ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
  while (::madvise(bytes_.data() + begin, end - begin, advice) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno == EINVAL) {
      touch_pages(bytes_.data() + begin, end - begin, write_);
      return {};
    }
    if (errno == ENOMEM || errno == EFAULT) {
      return base::fail(Code::kExhausted, fmt::format("no memory for {} bytes at {}", end - begin, begin));
    }
    return base::fail_errno("populate memory", errno);
  }
  return {};
}

}  // namespace tpusync::os
