// Element types by the names that XLA prints.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "tpusync/base/error.h"

namespace tpusync::layout {

// A value: the name and how many bits an element has. Immutable.
struct DType {
  std::string_view name;  // upper case, lives for ever
  std::uint32_t bits = 0;

  // Bits that an element takes in memory where a layout says nothing else: whole bytes.
  std::uint32_t storage_bits() const { return bits < 8 ? 8 : bits; }

  friend bool operator==(const DType&, const DType&) = default;
};

// All types that are known.
std::span<const DType> all_dtypes();

// kInvalid for a name that is not among them. Letters of either case.
base::Result<DType> parse_dtype(std::string_view name);

}  // namespace tpusync::layout
