// Where the pages of a KV pool lie in the tiled array of one layer, whatever the engine's shape of it:
//
//   (tokens, heads, dim)                       SGLang's pools: a page is page_size indices of dimension 0
//   (pages, page_size, heads, dim)             keys or values apart: a page is one index of dimension 0
//   (pages, page_size, heads * 2 / p, p, dim)  ragged paged attention: keys and values side by side, packed
//   (pages, page_size / p, p, dim), (pages, dim, page_size)   latents of MLA, packed or transposed
#pragma once

#include <cstdint>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/layout/copy_nest.h"
#include "tpusync/layout/copy_run.h"
#include "tpusync/layout/tiled_layout.h"

namespace tpusync::layout {

// A value. Immutable. Every layer of a pool has the same.
class KvPages {
 public:
  // `page_indices` indices of dimension 0 are a page. kInvalid for a scalar, for no indices, or where
  // dimension 0 is no whole number of pages.
  static base::Result<KvPages> make(TiledLayout layer, std::int64_t page_indices);

  const TiledLayout& layer() const { return layer_; }
  std::int64_t num_pages() const { return layer_.dims()[0] / page_indices_; }

  // Bytes of the elements of a page, padding apart.
  std::uint64_t page_bytes() const { return page_bytes_; }

  // The bytes of a page in the order of memory, packed into page_bytes() of destination: one run where the
  // page is contiguous. kInvalid for a page that is not there or not made of whole bytes.
  base::Result<std::vector<CopyRun>> runs(std::int64_t page) const;

  // The page as a row-major array of its own: from device tiles to a host page in one plan.
  base::Result<std::vector<CopyNest>> to_linear(std::int64_t page) const;

  // And back: what to_linear moves, the other way round.
  base::Result<std::vector<CopyNest>> from_linear(std::int64_t page) const;

 private:
  KvPages(TiledLayout layer, TiledLayout page, std::int64_t page_indices);
  base::Status check_page(std::int64_t page) const;
  Dims origin_of(std::int64_t page) const;

  TiledLayout layer_;
  TiledLayout page_;  // row-major
  std::int64_t page_indices_;
  std::uint64_t page_bytes_;
};

}  // namespace tpusync::layout
