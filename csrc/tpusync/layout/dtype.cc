#include "tpusync/layout/dtype.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace tpusync::layout {

namespace {

constexpr std::array<DType, 28> kAll{{{"PRED", 8},       {"S2", 2},
                                      {"S4", 4},         {"S8", 8},
                                      {"S16", 16},       {"S32", 32},
                                      {"S64", 64},       {"U2", 2},
                                      {"U4", 4},         {"U8", 8},
                                      {"U16", 16},       {"U32", 32},
                                      {"U64", 64},       {"F16", 16},
                                      {"BF16", 16},      {"F32", 32},
                                      {"F64", 64},       {"F8E5M2", 8},
                                      {"F8E4M3", 8},     {"F8E4M3FN", 8},
                                      {"F8E3M4", 8},     {"F8E4M3B11FNUZ", 8},
                                      {"F8E5M2FNUZ", 8}, {"F8E4M3FNUZ", 8},
                                      {"F8E8M0FNU", 8},  {"F4E2M1FN", 4},
                                      {"C64", 64},       {"C128", 128}}};

char upper(char c) {
  return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
}

}  // namespace

std::span<const DType> all_dtypes() {
  return kAll;
}

base::Result<DType> parse_dtype(std::string_view name) {
  for (const DType& dtype : all_dtypes()) {
    if (std::ranges::equal(dtype.name, name, {}, {}, &upper)) return dtype;
  }
  return base::fail(base::Code::kInvalid, fmt::format("dtype '{}' is unknown", name.substr(0, 40)));
}

}  // namespace tpusync::layout
