#include "tpusync/flash/region_summary.h"

#include <algorithm>
#include <optional>

namespace tpusync::flash {

using base::Result;
using index::SlotId;

namespace {

struct Entry {
  std::uint64_t hash = 0;
  std::uint64_t parent = 0;
  SlotId slot{};
  std::uint32_t root = 0;  // its number
  std::uint16_t depth = 0;
};

// The entry whose key begins with `hash`, among entries sorted by hash; nothing if the page is not here.
const Entry* find(const std::vector<Entry>& by_hash, std::uint64_t hash) {
  const auto found = std::ranges::lower_bound(by_hash, hash, {}, &Entry::hash);
  return found != by_hash.end() && found->hash == hash ? &*found : nullptr;
}

// Every entry's root: its parent's, or itself where the parent is not here. Parents come first in order of
// depth; a parent that is not less deep is none.
void find_roots(std::vector<Entry>& by_hash) {
  std::vector<std::uint32_t> by_depth(by_hash.size());
  for (std::uint32_t i = 0; i < by_depth.size(); ++i) by_depth[i] = i;
  std::ranges::stable_sort(by_depth, {}, [&](std::uint32_t i) { return by_hash[i].depth; });
  for (const std::uint32_t i : by_depth) {
    Entry& entry = by_hash[i];
    const Entry* const parent = entry.parent == 0 ? nullptr : find(by_hash, entry.parent);
    entry.root = parent != nullptr && parent->depth < entry.depth ? parent->root : i;
  }
}

std::vector<PrefixTree> trees_of(const std::vector<Entry>& by_hash, std::vector<std::uint32_t>& roots) {
  std::vector<PrefixTree> trees(by_hash.size());
  for (const Entry& entry : by_hash) {
    PrefixTree& tree = trees[entry.root];
    const std::uint16_t root_depth = by_hash[entry.root].depth;
    ++tree.num_pages;
    tree.root_depth = root_depth;
    tree.num_pages_longest = std::max<std::uint32_t>(tree.num_pages_longest, entry.depth - root_depth + 1u);
  }
  for (std::uint32_t i = 0; i < by_hash.size(); ++i) {
    if (trees[i].num_pages > 0) roots.push_back(i);
  }
  return trees;
}

}  // namespace

Result<RegionSummary> summarize(const RegionReader& reader, std::size_t num_trees_max) {
  RegionSummary summary;
  const auto num_slots = reader.num_slots();
  const auto num_records = reader.num_records();
  if (!num_slots) return tl::unexpected(num_slots.error());
  if (!num_records) return tl::unexpected(num_records.error());
  summary.num_slots = *num_slots;
  std::vector<Entry> entries;
  std::uint64_t oldest = kGenerationMax, newest = 0;
  const auto scanned = reader.scan(SlotId{0}, *num_records, [&](SlotId slot, const RegionReader::Seen& seen) {
    if (seen.kind == RegionReader::Kind::kDamaged) {
      ++summary.num_damaged;
      return;
    }
    const SlotRecord& record = seen.record;
    oldest = std::min(oldest, record.generation);
    newest = std::max(newest, record.generation);
    entries.push_back({.hash = record.key.short_hash(),
                       .parent = record.ancestry.parent,
                       .slot = slot,
                       .depth = record.ancestry.depth});
  });
  if (!scanned) return tl::unexpected(scanned.error());
  summary.num_entries = static_cast<std::uint32_t>(entries.size());
  if (!entries.empty()) {
    summary.oldest_unix_ns = generation_unix_ns(oldest);
    summary.newest_unix_ns = generation_unix_ns(newest);
  }
  std::ranges::sort(entries, {}, &Entry::hash);
  find_roots(entries);
  std::vector<std::uint32_t> roots;
  const std::vector<PrefixTree> trees = trees_of(entries, roots);
  summary.num_trees = static_cast<std::uint32_t>(roots.size());
  const std::size_t num_kept = std::min(num_trees_max, roots.size());
  std::partial_sort(
      roots.begin(), roots.begin() + static_cast<std::ptrdiff_t>(num_kept), roots.end(),
      [&](std::uint32_t a, std::uint32_t b) { return trees[a].num_pages > trees[b].num_pages; });
  for (std::size_t i = 0; i < num_kept; ++i) {
    const auto seen = reader.look(entries[roots[i]].slot);
    // A root that was evicted since has no name any more.
    if (!seen || seen->kind != RegionReader::Kind::kHolds) continue;
    if (seen->record.key.short_hash() != entries[roots[i]].hash) continue;
    PrefixTree tree = trees[roots[i]];
    tree.root = seen->record.key;
    summary.largest.push_back(tree);
  }
  return summary;
}

}  // namespace tpusync::flash
