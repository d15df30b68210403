#include "tpusync/layout/copy_run.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tpusync::layout {

namespace {

std::optional<std::uint64_t> end_of(std::uint64_t offset, std::uint64_t stride, const CopyRun& run) {
  if (run.count == 0 || run.length == 0) return 0;
  std::uint64_t span = 0, start = 0, end = 0;
  if (__builtin_mul_overflow(stride, run.count - 1, &span) || __builtin_add_overflow(offset, span, &start) ||
      __builtin_add_overflow(start, run.length, &end)) {
    return std::nullopt;
  }
  return end;
}

bool continues_at(const CopyRun& last, const CopyRun& run, std::uint64_t src_stride,
                  std::uint64_t dst_stride) {
  return run.src_offset == last.src_offset + last.count * src_stride &&
         run.dst_offset == last.dst_offset + last.count * dst_stride;
}

// Makes `last` the union of both where `run` goes on with the same length and strides.
bool grow(CopyRun& last, const CopyRun& run) {
  if (last.count == 1 && run.count == 1 && continues_at(last, run, last.length, last.length)) {
    last.length += run.length;
    return true;
  }
  if (last.length != run.length) return false;
  std::uint64_t src_stride = last.src_stride, dst_stride = last.dst_stride;
  if (last.count == 1) {
    if (run.src_offset < last.src_offset + last.length || run.dst_offset < last.dst_offset + last.length)
      return false;
    src_stride = run.src_offset - last.src_offset;
    dst_stride = run.dst_offset - last.dst_offset;
  }
  if (run.count > 1 && (run.src_stride != src_stride || run.dst_stride != dst_stride)) return false;
  if (!continues_at(last, run, src_stride, dst_stride)) return false;
  last.src_stride = src_stride;
  last.dst_stride = dst_stride;
  last.count += run.count;
  return true;
}

// Pieces of a size that is known here become a few vector moves instead of a call each.
template <std::size_t kLength>
void copy_fixed(std::byte* dst, const std::byte* src, const CopyRun& run) {
  for (std::uint64_t i = 0; i < run.count; ++i) {
    std::memcpy(dst, src, kLength);
    dst += run.dst_stride;
    src += run.src_stride;
  }
}

constexpr std::uint64_t kLineBytes = 64;
constexpr std::uint64_t kStreamedLengthMin =
    4 * kLineBytes;  // below it too many lines are written in two halves

#if defined(__SSE2__)
void copy_streaming(std::byte* dst, const std::byte* src, std::uint64_t length) {
  const std::uint64_t head = -reinterpret_cast<std::uintptr_t>(dst) % kLineBytes;
  std::memcpy(dst, src, head);
  const std::uint64_t body_end = head + (length - head) / kLineBytes * kLineBytes;
  for (std::uint64_t at = head; at < body_end; at += kLineBytes) {
    const auto* from = reinterpret_cast<const __m128i*>(src + at);
    auto* to = reinterpret_cast<__m128i*>(dst + at);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(dst + body_end, src + body_end, length - body_end);
}
#else
void copy_streaming(std::byte* dst, const std::byte* src, std::uint64_t length) {
  std::memcpy(dst, src, length);
}
#endif

void copy_any(std::byte* dst, const std::byte* src, const CopyRun& run,
              void (*copy)(std::byte*, const std::byte*, std::uint64_t)) {
  for (std::uint64_t i = 0; i < run.count; ++i)
    copy(dst + i * run.dst_stride, src + i * run.src_stride, run.length);
}

}  // namespace

std::optional<std::uint64_t> src_end(const CopyRun& run) {
  return end_of(run.src_offset, run.src_stride, run);
}
std::optional<std::uint64_t> dst_end(const CopyRun& run) {
  return end_of(run.dst_offset, run.dst_stride, run);
}

CopyRun canonical(CopyRun run) {
  if (run.count > 1 && run.src_stride == run.length && run.dst_stride == run.length) {
    run.length *= run.count;
    run.count = 1;
  }
  if (run.count == 1) run.src_stride = run.dst_stride = 0;
  return run;
}

void append_merged(std::vector<CopyRun>& runs, const CopyRun& run) {
  if (run.length == 0 || run.count == 0) return;
  if (runs.empty() || !grow(runs.back(), run)) runs.push_back(run);
}

void cut_runs(const std::vector<CopyRun>& runs, std::uint64_t size_bytes_max, std::vector<CopyRun>& out) {
  for (const CopyRun& run : runs) {
    if (run.size_bytes() <= size_bytes_max) {
      out.push_back(run);
      continue;
    }
    const bool single = run.count == 1;
    const std::uint64_t unit = single ? 1 : run.length;
    const std::uint64_t total = single ? run.length : run.count;
    const std::uint64_t step = std::max<std::uint64_t>(1, size_bytes_max / unit);
    for (std::uint64_t at = 0; at < total; at += step) {
      CopyRun part = run;
      const std::uint64_t size = std::min(step, total - at);
      part.src_offset += at * (single ? 1 : run.src_stride);
      part.dst_offset += at * (single ? 1 : run.dst_stride);
      (single ? part.length : part.count) = size;
      out.push_back(canonical(part));
    }
  }
}

void copy_run(std::byte* dst, const std::byte* src, const CopyRun& run, Stores stores) {
  dst += run.dst_offset;
  src += run.src_offset;
  if (stores == Stores::kStreaming && run.length >= kStreamedLengthMin)
    return copy_any(dst, src, run, &copy_streaming);
  switch (run.length) {
    case 64:
      return copy_fixed<64>(dst, src, run);
    case 128:
      return copy_fixed<128>(dst, src, run);
    case 256:
      return copy_fixed<256>(dst, src, run);
    default:
      break;
  }
  copy_any(dst, src, run,
           [](std::byte* to, const std::byte* from, std::uint64_t length) { std::memcpy(to, from, length); });
}

void streaming_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace tpusync::layout
