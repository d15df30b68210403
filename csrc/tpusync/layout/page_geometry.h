// Where the KV of a token lies in a pool of SGLang: a part (K, V or MLA's latent) of one layer is a row of
// num_heads * head_bytes, and a pool orders (slot, layer, head) in one of these ways, most major first:
//
//   device             one buffer per layer: slot, head; rows may be further apart than they are long
//   tiled              one buffer per layer, in tiles: tiled_pool.h
//   layer_first        layer, slot, head
//   page_first         slot, layer, head; token-major inside a page
//   page_first_direct  page, layer, token of the page, head
//   page_head          page, head, token of the page, layer
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <tuple>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/layout/copy_run.h"
#include "tpusync/layout/tiled_pool.h"

namespace tpusync::layout {

enum class HostLayout : unsigned char { kLayerFirst, kPageFirst, kPageFirstDirect, kPageHead };

// The layout of SGLang's name for it; kInvalid names those that exist.
base::Result<HostLayout> parse_host_layout(std::string_view name);

// A value. Immutable.
class PageGeometry {
 public:
  struct DeviceOptions {
    std::int64_t num_layers = 0;
    std::int64_t num_slots = 0;  // token slots, the padding page included
    std::int64_t row_bytes = 0;
    std::int64_t row_stride_bytes = 0;
    std::int64_t page_size = 0;
  };
  struct HostOptions {
    HostLayout layout = HostLayout::kPageFirst;
    std::int64_t num_layers = 0;
    std::int64_t num_slots = 0;  // a multiple of page_size in the paged layouts
    std::int64_t num_heads = 0;
    std::int64_t head_bytes = 0;
    std::int64_t page_size = 0;
  };

  // kInvalid when a value is below 1, when they contradict each other, or when a pool exceeds 2^31 slots or
  // 2^62 bytes.
  static base::Result<PageGeometry> device(const DeviceOptions& options);
  static base::Result<PageGeometry> host(const HostOptions& options);
  // The slots of `layer` are those of whole pages; every layer has the same.
  static base::Result<PageGeometry> tiled(TiledPool layer, std::int64_t num_layers, std::int64_t page_size);

  // The bytes of page `page` in a layer, in the order of memory, in the buffer that holds the layer: one run
  // where the page is contiguous. They fill a destination of page_bytes() / num_layers() without gaps.
  // kInvalid for a page or a layer that is not there; kExhausted where it takes more than 2^22 runs.
  base::Result<std::vector<CopyRun>> runs(std::int64_t page, std::int64_t layer) const;

  std::uint64_t num_layers() const { return num_layers_; }
  std::uint64_t num_slots() const { return num_slots_; }
  std::uint64_t page_size() const { return page_size_; }
  std::uint64_t num_heads() const { return num_heads_; }  // 1 in a device geometry: the row is not divided
  std::uint64_t head_bytes() const { return head_bytes_; }
  std::uint64_t row_bytes() const { return num_heads_ * head_bytes_; }
  std::uint64_t page_bytes() const { return row_bytes() * page_size_ * num_layers_; }  // of one part

  // Buffers that hold one part: one per layer on the device, one in all on the host.
  std::uint64_t buffers_per_part() const { return layer_stride_ == 0 ? num_layers_ : 1; }

  // Null unless in tiles. The strides below are 0 then, and offset() means nothing.
  const TiledPool* tiles() const { return tiles_.get(); }

  // Offset of a token's head in layer 0, and what each further layer or token of the same span adds.
  std::uint64_t offset(std::uint64_t slot, std::uint64_t head) const;
  std::uint64_t layer_stride() const { return layer_stride_; }  // 0: a layer has a buffer of its own
  std::uint64_t token_stride() const { return token_stride_; }
  std::uint64_t head_stride() const { return head_stride_; }

  // Slots [k * span, (k + 1) * span) lie at a constant token_stride().
  std::uint64_t span_slots() const;

  // True where a row is one piece of memory.
  bool whole_rows() const { return !tiles_ && (num_heads_ == 1 || head_stride_ == head_bytes_); }

  // True where only whole, aligned pages have a place.
  bool paged() const { return span_slots() != num_slots_; }

  friend bool operator==(const PageGeometry& a, const PageGeometry& b);

 private:
  PageGeometry() = default;
  auto numbers() const {
    return std::tuple(num_layers_, num_slots_, page_size_, num_heads_, head_bytes_, page_stride_,
                      token_stride_, layer_stride_, head_stride_);
  }

  std::uint64_t num_layers_ = 0, num_slots_ = 0, page_size_ = 0, num_heads_ = 0, head_bytes_ = 0;
  std::uint64_t page_stride_ = 0, token_stride_ = 0, layer_stride_ = 0, head_stride_ = 0;
  std::shared_ptr<const TiledPool> tiles_;  // shared by copies of this value
};

}  // namespace tpusync::layout
