// What the tests of this room share: a directory in memory, keys, pages that tell what they are. Not for
// production.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tpusync/base/checksum.h"
#include "tpusync/base/prng.h"
#include "tpusync/host/open_region.h"

namespace tpusync::host::testing {

// A directory of its own, on tmpfs where there is one; gone with the object.
class MemoryDirectory {
 public:
  MemoryDirectory() {
    const std::string parent = std::filesystem::is_directory("/dev/shm") ? "/dev/shm" : ::testing::TempDir();
    path_ = parent + "/tpusync-test-XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr) std::abort();
  }
  MemoryDirectory(const MemoryDirectory&) = delete;
  MemoryDirectory& operator=(const MemoryDirectory&) = delete;
  ~MemoryDirectory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline index::PageKey key_of(std::uint64_t number) {
  index::PageKey key;
  base::Prng(number * 2654435761u + 17).fill(key.bytes);
  return key;
}

inline std::vector<index::PageKey> keys_of(std::uint64_t first, std::size_t count) {
  std::vector<index::PageKey> keys;
  for (std::size_t i = 0; i < count; ++i) keys.push_back(key_of(first + i));
  return keys;
}

inline Digest digest_of(std::uint64_t number) {
  Digest digest;
  base::Prng(number).fill(digest);
  return digest;
}

// Two pieces per page, like K and V of a page_first pool; 4096 bytes let a region have any number of slots.
inline Geometry small_geometry(std::uint64_t num_slots, std::uint64_t piece_bytes = 4096) {
  return {.piece_bytes = {piece_bytes, piece_bytes}, .num_slots = num_slots};
}

inline OpenOptions options_in(const std::string& root, Geometry geometry,
                              std::uint64_t namespace_number = 1) {
  return {.root = root,
          .name_space = digest_of(namespace_number),
          .geometry = std::move(geometry),
          .reserve_bytes = 0,
          .num_threads = 2};
}

// The bytes that belong to a key, the same wherever they are asked for.
inline void fill_page(const Region& region, index::SlotId slot, std::uint64_t number) {
  base::Prng prng(number ^ 0xabcdef);
  for (std::size_t i = 0; i < region.file().num_pieces(); ++i) prng.fill(region.piece(slot, i));
}

// Memory for one page that does not lie in a region.
class PageBuffer {
 public:
  explicit PageBuffer(const Geometry& geometry) {
    for (const std::uint64_t bytes : geometry.piece_bytes) pieces_.emplace_back(bytes);
    for (auto& piece : pieces_) addresses_.push_back(piece.data());
  }
  Pieces to() { return addresses_; }
  bool is_page(std::uint64_t number) const {
    base::Prng prng(number ^ 0xabcdef);
    for (const auto& piece : pieces_) {
      std::vector<std::byte> expected(piece.size());
      prng.fill(expected);
      if (expected != piece) return false;
    }
    return true;
  }

 private:
  std::vector<std::vector<std::byte>> pieces_;
  std::vector<std::byte*> addresses_;
};

// Allocates, writes and seals the pages of keys_of(first, count).
inline std::vector<index::SlotId> put_pages(Region& region, std::uint64_t first, std::size_t count,
                                            std::span<const index::PageKey> prefix = {}) {
  const std::vector<index::SlotId> slots = region.alloc(count);
  if (slots.size() != count) return {};
  for (std::size_t i = 0; i < count; ++i) fill_page(region, slots[i], first + i);
  for (const base::Code code : region.seal(prefix, keys_of(first, count), slots)) {
    if (code != base::Code::kOk) return {};
  }
  return slots;
}

}  // namespace tpusync::host::testing
