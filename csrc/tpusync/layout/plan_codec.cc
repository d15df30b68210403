// The bytes of a plan, little-endian, without gaps:
//
//   "TSPLAN01"
//   u32 sources, u32 destinations, u64 size of each source, u64 size of each destination
//   per destination: u32 runs, then per run u64 offset, length, count, stride
//   u32 steps, then per step: u32 source, u32 destination, u32 nests, then per nest
//     u64 src_offset, dst_offset, length (bits), u32 loops, then per loop u64 count, src_stride, dst_stride
//   u64 XXH3 of all before
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstring>

#include "tpusync/base/checksum.h"
#include "tpusync/layout/reshard.h"

namespace tpusync::layout {

using base::Code;
using base::Result;
using base::Status;

namespace {

static_assert(std::endian::native == std::endian::little);

constexpr char kMagic[9] = "TSPLAN01";
constexpr std::size_t kMagicBytes = 8, kChecksumBytes = 8;
constexpr std::uint64_t kBufferBytesMax = std::uint64_t{1} << 57;  // so that bits fit too
constexpr std::size_t kLoopsMax = 64;

class Writer {
 public:
  template <std::unsigned_integral T>
  void put(T value) {
    const auto* at = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), at, at + sizeof value);
  }
  void put_count(std::size_t count) { put(static_cast<std::uint32_t>(count)); }
  void put_raw(const void* data, std::size_t size) {
    const auto* at = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), at, at + size);
  }
  std::vector<std::byte> finish() {
    put(base::checksum64(bytes_));
    return std::move(bytes_);
  }

 private:
  std::vector<std::byte> bytes_;
};

tl::unexpected<base::Error> corrupt(std::string_view what) {
  return base::fail(Code::kCorrupt, fmt::format("reshard plan: {}", what));
}

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <std::unsigned_integral T>
  T get() {
    T value = 0;
    if (bytes_.size() < sizeof value) {
      short_ = true;
      return 0;
    }
    std::memcpy(&value, bytes_.data(), sizeof value);
    bytes_ = bytes_.subspan(sizeof value);
    return value;
  }

  // A number of items of at least `item_bytes` each; 0 where as many cannot follow.
  std::size_t get_count(std::size_t item_bytes) {
    const auto count = get<std::uint32_t>();
    if (count > bytes_.size() / item_bytes) short_ = true;
    return short_ ? 0 : count;
  }

  bool ok() const { return !short_; }
  bool at_end() const { return bytes_.empty(); }

 private:
  std::span<const std::byte> bytes_;
  bool short_ = false;
};

// One past the last bit, or nullopt where that is beyond `limit`.
bool fits(std::uint64_t offset, const CopyNest& nest, std::uint64_t Loop::* stride, std::uint64_t limit) {
  unsigned __int128 end = static_cast<unsigned __int128>(offset) + nest.length;
  for (const Loop& loop : nest.loops) {
    end += static_cast<unsigned __int128>(loop.count - 1) * (loop.*stride);
    if (end > limit) return false;
  }
  return end <= limit;
}

// Bits that a nest moves, at most `limit`; nullopt beyond. Keeps a hostile plan from running for ever.
bool moves_at_most(const CopyNest& nest, std::uint64_t limit) {
  unsigned __int128 bits = nest.length;
  for (const Loop& loop : nest.loops) {
    bits *= loop.count;
    if (bits > limit) return false;
  }
  return true;
}

Result<CopyRun> read_run(Reader& in, std::uint64_t size_bytes) {
  CopyRun run;
  run.src_offset = run.dst_offset = in.get<std::uint64_t>();
  run.length = in.get<std::uint64_t>();
  run.count = in.get<std::uint64_t>();
  run.src_stride = run.dst_stride = in.get<std::uint64_t>();
  if (!in.ok()) return corrupt("too short");
  const auto end = dst_end(run);
  if (run.length == 0 || run.count == 0 || !end || *end > size_bytes)
    return corrupt("padding beyond its buffer");
  if (run.count > 1 && run.dst_stride < run.length) return corrupt("padding that overlaps itself");
  return run;
}

Result<CopyNest> read_nest(Reader& in, std::uint64_t src_bytes, std::uint64_t dst_bytes) {
  CopyNest nest;
  nest.src_offset = in.get<std::uint64_t>();
  nest.dst_offset = in.get<std::uint64_t>();
  nest.length = in.get<std::uint64_t>();
  const std::size_t num_loops = in.get_count(3 * sizeof(std::uint64_t));
  if (num_loops > kLoopsMax) return corrupt("too many loops");
  for (std::size_t i = 0; i < num_loops; ++i) {
    Loop& loop = nest.loops.emplace_back();
    loop.count = in.get<std::uint64_t>();
    loop.src_stride = in.get<std::uint64_t>();
    loop.dst_stride = in.get<std::uint64_t>();
    if (loop.count < 2) return corrupt("a loop of less than two rounds");
  }
  if (!in.ok()) return corrupt("too short");
  if (nest.length == 0) return corrupt("an empty piece");
  if (!fits(nest.src_offset, nest, &Loop::src_stride, src_bytes * 8) ||
      !fits(nest.dst_offset, nest, &Loop::dst_stride, dst_bytes * 8) || !moves_at_most(nest, dst_bytes * 8)) {
    return corrupt("a piece beyond its buffer");
  }
  CopyNest canonical = nest;
  make_canonical(canonical);
  if (canonical != nest) return corrupt("loops in no canonical form");
  return nest;
}

Status read_buffers(Reader& in, ReshardPlan& plan) {
  const std::size_t num_src = in.get_count(8), num_dst = in.get_count(8);
  for (std::size_t i = 0; i < num_src; ++i) plan.src_bytes.push_back(in.get<std::uint64_t>());
  for (std::size_t i = 0; i < num_dst; ++i) plan.dst_bytes.push_back(in.get<std::uint64_t>());
  for (const auto* sizes : {&plan.src_bytes, &plan.dst_bytes}) {
    for (const std::uint64_t size : *sizes) {
      if (size > kBufferBytesMax) return corrupt("a buffer of more than 2^57 bytes");
    }
  }
  for (std::size_t i = 0; i < num_dst; ++i) {
    auto& padding = plan.dst_padding.emplace_back();
    for (std::size_t left = in.get_count(4 * sizeof(std::uint64_t)); left > 0; --left) {
      const auto run = read_run(in, plan.dst_bytes[i]);
      if (!run) return tl::unexpected(run.error());
      padding.push_back(*run);
    }
  }
  return in.ok() ? Status() : corrupt("too short");
}

Status read_steps(Reader& in, ReshardPlan& plan) {
  for (std::size_t left = in.get_count(3 * sizeof(std::uint32_t)); left > 0; --left) {
    PlanStep& step = plan.steps.emplace_back();
    step.src = in.get<std::uint32_t>();
    step.dst = in.get<std::uint32_t>();
    if (!in.ok() || step.src >= plan.src_bytes.size() || step.dst >= plan.dst_bytes.size()) {
      return corrupt("a step between buffers that it does not have");
    }
    for (std::size_t nests = in.get_count(3 * 8 + 4); nests > 0; --nests) {
      auto nest = read_nest(in, plan.src_bytes[step.src], plan.dst_bytes[step.dst]);
      if (!nest) return tl::unexpected(std::move(nest).error());
      step.nests.push_back(*std::move(nest));
    }
  }
  if (!in.ok()) return corrupt("too short");
  return in.at_end() ? Status() : corrupt("bytes after its end");
}

}  // namespace

std::vector<std::byte> encode_plan(const ReshardPlan& plan) {
  Writer out;
  out.put_raw(kMagic, kMagicBytes);
  out.put_count(plan.src_bytes.size());
  out.put_count(plan.dst_bytes.size());
  for (const std::uint64_t size : plan.src_bytes) out.put(size);
  for (const std::uint64_t size : plan.dst_bytes) out.put(size);
  for (const auto& padding : plan.dst_padding) {
    out.put_count(padding.size());
    for (const CopyRun& run : padding) {
      for (const std::uint64_t value : {run.dst_offset, run.length, run.count, run.dst_stride})
        out.put(value);
    }
  }
  out.put_count(plan.steps.size());
  for (const PlanStep& step : plan.steps) {
    out.put(step.src);
    out.put(step.dst);
    out.put_count(step.nests.size());
    for (const CopyNest& nest : step.nests) {
      for (const std::uint64_t value : {nest.src_offset, nest.dst_offset, nest.length}) out.put(value);
      out.put_count(nest.loops.size());
      for (const Loop& loop : nest.loops) {
        for (const std::uint64_t value : {loop.count, loop.src_stride, loop.dst_stride}) out.put(value);
      }
    }
  }
  return out.finish();
}

Result<ReshardPlan> decode_plan(std::span<const std::byte> bytes) {
  if (bytes.size() < kMagicBytes + kChecksumBytes || std::memcmp(bytes.data(), kMagic, kMagicBytes) != 0) {
    return corrupt("not one, or of another version");
  }
  const auto body = bytes.first(bytes.size() - kChecksumBytes);
  std::uint64_t checksum = 0;
  std::memcpy(&checksum, bytes.data() + body.size(), sizeof checksum);
  if (checksum != base::checksum64(body)) return corrupt("its checksum does not fit");
  Reader in(body.subspan(kMagicBytes));
  ReshardPlan plan;
  TPUSYNC_TRY(read_buffers(in, plan));
  TPUSYNC_TRY(read_steps(in, plan));
  return plan;
}

}  // namespace tpusync::layout
