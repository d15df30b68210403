// The plan that takes an array from one list of shards to another: pure, a value, made once and applied
// often.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/base/parallel.h"
#include "tpusync/layout/copy_nest.h"
#include "tpusync/layout/copy_run.h"
#include "tpusync/layout/shard.h"
#include "tpusync/layout/shuffle.h"

namespace tpusync::layout {

// Part of a plan: what one source shard gives to one destination shard. A value.
struct PlanStep {
  std::uint32_t src = 0;
  std::uint32_t dst = 0;
  std::vector<CopyNest> nests;
  friend bool operator==(const PlanStep&, const PlanStep&) = default;
};

// A value. Every element of every destination is written once, all other bytes of a destination are zero
// after it.
struct ReshardPlan {
  std::vector<std::uint64_t> src_bytes;  // sizes of the buffers
  std::vector<std::uint64_t> dst_bytes;
  std::vector<std::vector<CopyRun>> dst_padding;  // bytes to be zero, per destination; offsets in dst_offset
  std::vector<PlanStep> steps;

  std::uint64_t moved_bits() const;

  // Checks the buffers: as many and as large as the plan says, no destination overlapping another buffer.
  base::Status check(std::span<const std::span<std::byte>> dst,
                     std::span<const std::span<const std::byte>> src) const;

  // Piece `piece` of `num_pieces`, any order and any thread but piece 0 before all others. Buffers as
  // checked.
  void apply_piece(std::span<const std::span<std::byte>> dst, std::span<const std::span<const std::byte>> src,
                   std::size_t piece, std::size_t num_pieces,
                   const ShuffleKernels& kernels = best_shuffle_kernels()) const;

  // All pieces, shared out to the caller's threads. kInvalid from check().
  base::Status apply(std::span<const std::span<std::byte>> dst,
                     std::span<const std::span<const std::byte>> src, base::ParallelFor& loop,
                     const ShuffleKernels& kernels = best_shuffle_kernels()) const;

  // One line per step: what goes where, in how many pieces, by which kernel.
  std::string describe() const;

  friend bool operator==(const ReshardPlan&, const ReshardPlan&) = default;
};

// kInvalid when arrays, dtypes or element sizes differ or when the sources lack an element that a destination
// wants; the first one missing is named. Where several sources hold an element the destinations share them
// out.
base::Result<ReshardPlan> plan_reshard(ShardSpec dst, ShardSpec src);

// The bytes of a plan and back: docs/formats/reshard-plan.md. decode returns kCorrupt for anything that
// encode does not produce, and never a plan that reaches beyond its buffers.
std::vector<std::byte> encode_plan(const ReshardPlan& plan);
base::Result<ReshardPlan> decode_plan(std::span<const std::byte> bytes);

}  // namespace tpusync::layout
