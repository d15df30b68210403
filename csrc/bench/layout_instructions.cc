// Runs one change of layout once inside measured(), for Callgrind to count: layout_instructions CASE KERNELS.
// Prints the number of bytes moved. Without arguments it prints its cases and the kernels that run here.
#include <cstdio>
#include <cstring>
#include <string_view>
#include <vector>

#include "tpusync/layout/convert.h"

namespace {

using namespace tpusync;
using layout::CopyNest;
using layout::Dims;
using layout::TiledLayout;

struct Case {
  const char* name;
  const char* dtype;
  Dims dims;
  const char* src;
  const char* dst;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"bf16-untile", "BF16", {4, 64, 8, 128}, "{3,2,1,0:T(8,128)(2,1)}", "{3,2,1,0}"},
      {"bf16-tile", "BF16", {4, 64, 8, 128}, "{3,2,1,0}", "{3,2,1,0:T(8,128)(2,1)}"},
      {"bf16-heads-apart", "BF16", {4, 64, 8, 128}, "{3,2,1,0:T(8,128)(2,1)}", "{3,1,2,0:T(8,128)(2,1)}"},
      {"fp8-untile", "F8E4M3FN", {4, 64, 4, 4, 128}, "{4,3,2,1,0:T(4,128)(4,1)}", "{4,3,2,1,0}"},
      {"fp8-tile", "F8E4M3FN", {4, 64, 4, 4, 128}, "{4,3,2,1,0}", "{4,3,2,1,0:T(4,128)(4,1)}"},
      {"bf16-pages-in-lanes", "BF16", {256, 16, 2, 64}, "{0,3,2,1:T(8,128)(2,1)}", "{3,2,1,0}"},
  };
  return all;
}

}  // namespace

extern "C" __attribute__((noinline)) void measured(std::byte* dst, const std::byte* src,
                                                   const std::vector<CopyNest>& nests,
                                                   const layout::ShuffleKernels& kernels) {
  base::SerialFor loop;
  layout::apply_nests(dst, src, nests, loop, kernels);
}

int main(int argc, char** argv) {
  if (argc != 3) {
    for (const Case& each : cases()) std::printf("case %s\n", each.name);
    for (const auto* kernels : layout::shuffle_kernels())
      std::printf("kernels %.*s\n", int(kernels->name.size()), kernels->name.data());
    return 0;
  }
  for (const Case& each : cases()) {
    if (std::strcmp(each.name, argv[1]) != 0) continue;
    const auto dtype = layout::parse_dtype(each.dtype).value();
    const auto src = TiledLayout::parse(each.src, dtype, each.dims).value();
    const auto dst = TiledLayout::parse(each.dst, dtype, each.dims).value();
    const Dims origin(each.dims.size());
    const auto nests = layout::plan_box(dst, origin, src, {origin, each.dims}).value();
    std::vector<std::byte> from(src.padded_bytes(), std::byte{1}), to(dst.padded_bytes());
    for (const auto* kernels : layout::shuffle_kernels()) {
      if (kernels->name != std::string_view(argv[2])) continue;
      measured(to.data(), from.data(), nests, *kernels);
      std::printf("%llu\n", static_cast<unsigned long long>(from.size()));
      return 0;
    }
  }
  return 1;
}
