// A CopyRun says which bytes go where: `count` pieces of `length` bytes, at a stride of its own on each side.
//
//   src  |piece|.....|piece|.....|piece|      src_offset + i * src_stride
//   dst  |piece|..|piece|..|piece|            dst_offset + i * dst_stride
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace tpusync::layout {

// A value; all fields in bytes but `count`. Canonical form: a single piece has strides 0, and pieces that
// follow each other without a gap on both sides are one piece.
struct CopyRun {
  std::uint64_t src_offset = 0;
  std::uint64_t dst_offset = 0;
  std::uint64_t length = 0;
  std::uint64_t count = 1;
  std::uint64_t src_stride = 0;
  std::uint64_t dst_stride = 0;

  std::uint64_t size_bytes() const { return length * count; }
  friend bool operator==(const CopyRun&, const CopyRun&) = default;
};

// One past the last byte that a run touches on a side; nullopt if that does not fit 64 bits.
std::optional<std::uint64_t> src_end(const CopyRun& run);
std::optional<std::uint64_t> dst_end(const CopyRun& run);

// The same bytes in canonical form.
CopyRun canonical(CopyRun run);

// Adds a canonical run behind `runs`, growing the last one where the two are one run.
void append_merged(std::vector<CopyRun>& runs, const CopyRun& run);

// Appends `runs` to `out`, none longer than about `size_bytes_max`: for work that is shared out in pieces.
void cut_runs(const std::vector<CopyRun>& runs, std::uint64_t size_bytes_max, std::vector<CopyRun>& out);

// Streaming stores go around the caches: for copies so large that their destination would be evicted before
// it is read. They save the read of each destination line: 1.4 to 2.6 times the rate of cached stores
// (benchmarks/).
enum class Stores : unsigned char { kCached, kStreaming };

// Moves the bytes. The two sides must not overlap and must hold what src_end() and dst_end() say. After
// kStreaming, call streaming_fence() before another thread is told of the bytes.
void copy_run(std::byte* dst, const std::byte* src, const CopyRun& run, Stores stores = Stores::kCached);
void streaming_fence();

}  // namespace tpusync::layout
