// The order in which a TPU holds the elements of an array in memory, as XLA prints it.
//
//   {1,0:T(8,128)(2,1)E(4)S(5)}     minor_to_major : tiles, element bits, memory space
//
// The dimensions in major-to-minor order are padded to whole tiles and split into (which tile, where inside
// it); the insides go to the end; each further tile does the same to what the one before it made. Padding
// holds anything.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/layout/axis_map.h"
#include "tpusync/layout/dtype.h"

namespace tpusync::layout {

using Dims = std::vector<std::int64_t>;

// What the text of a layout says, apart from the array it is for. A value.
struct LayoutSpec {
  std::vector<std::int64_t> minor_to_major;
  std::vector<std::vector<std::int64_t>> tiles;
  std::int64_t element_bits = 0;  // 0: the dtype's storage bits
  std::int64_t memory_space = 0;  // no influence on bytes

  friend bool operator==(const LayoutSpec&, const LayoutSpec&) = default;
};

// kInvalid for text that is malformed, kUnsupported for what XLA may print and this cannot represent; both
// name the text and the position.
base::Result<LayoutSpec> parse_layout_spec(std::string_view text);
std::string to_text(const LayoutSpec& spec);

// A value. Immutable. Numbers cannot overflow: what would is refused when it is made.
class TiledLayout {
 public:
  static constexpr std::size_t kRankMax = 8;
  static constexpr std::size_t kTileLevelsMax = 3;
  static constexpr std::int64_t kTileElementsMax = std::int64_t{1} << 16;
  static constexpr std::uint64_t kPaddedBitsMax = std::uint64_t{1} << 60;

  static base::Result<TiledLayout> parse(std::string_view text, DType dtype,
                                         std::span<const std::int64_t> dims);
  static base::Result<TiledLayout> make(DType dtype, std::span<const std::int64_t> dims, LayoutSpec spec);

  // Row-major without tiles, in whole bytes.
  static base::Result<TiledLayout> linear(DType dtype, std::span<const std::int64_t> dims);

  const DType& dtype() const { return dtype_; }
  const Dims& dims() const { return dims_; }
  const LayoutSpec& spec() const { return spec_; }
  std::string text() const { return to_text(spec_); }
  std::size_t rank() const { return dims_.size(); }

  std::uint64_t element_bits() const { return element_bits_; }
  std::uint64_t num_elements() const;  // without padding
  std::uint64_t padded_elements() const { return padded_elements_; }
  std::uint64_t padded_bytes() const { return (padded_elements_ * element_bits_ + 7) / 8; }

  // padded_bytes / dims[0] where dimension 0 is physically most major and no tile touches it; else nullopt.
  std::optional<std::uint64_t> page_bytes() const;

  // Place of an element. `index` has rank() entries within dims().
  std::uint64_t offset_elements(std::span<const std::int64_t> index) const;
  const AxisMap& axis(std::size_t dim) const { return axes_[dim]; }

  friend bool operator==(const TiledLayout&, const TiledLayout&) = default;

 private:
  TiledLayout() = default;
  base::Status place();

  DType dtype_;
  Dims dims_;
  LayoutSpec spec_;
  std::uint64_t element_bits_ = 0;
  std::uint64_t padded_elements_ = 0;
  std::vector<AxisMap> axes_;
};

}  // namespace tpusync::layout
