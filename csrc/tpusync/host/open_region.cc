#include "tpusync/host/open_region.h"

#include <fmt/format.h>

#include <algorithm>

#include "tpusync/base/log.h"
#include "tpusync/host/registry.h"
#include "tpusync/host/sizing.h"

namespace tpusync::host {

using base::Code;
using base::Result;
using base::Status;

namespace {

constexpr int kNumRegionsMax = 1024;  // of one namespace
constexpr int kNumThreadsMax = 256;

Result<Sizing> size_up(const OpenOptions& options, const Registry& registry, std::uint64_t present_bytes) {
  const Result<os::MemoryLimits> limits = os::memory_limits(registry.root(), options.memory_roots);
  if (!limits) return tl::unexpected(limits.error());
  std::uint64_t regions_bytes = 0;
  for (const Registry::Entry& entry : registry.entries()) regions_bytes += entry.memory_bytes;
  return size_up(SizingInput{
      .geometry = options.geometry,
      .table_bytes = make_header(options.geometry, options.name_space, kSpanAlignBytes, 0).table_span_bytes(),
      .present_bytes = present_bytes,
      .reserve_bytes = options.reserve_bytes,
      .cap_bytes = options.cap_bytes,
      .regions_bytes = regions_bytes,
      .limits = *limits});
}

// Makes room, if need be by removing what nobody writes any more.
Status make_room(const OpenOptions& options, const Registry& registry, std::uint64_t present_bytes) {
  Result<Sizing> sizing = size_up(options, registry, present_bytes);
  if (!sizing) return tl::unexpected(sizing.error());
  for (const Digest* except : {&options.name_space, static_cast<const Digest*>(nullptr)}) {
    if (sizing->missing_bytes() == 0) return {};
    // What this process is about to adopt must not go: it counts on present_bytes.
    if (except == nullptr && present_bytes > 0) break;
    const std::uint64_t freed_bytes = registry.remove_dead(sizing->missing_bytes(), except);
    if (freed_bytes == 0) continue;
    base::log(base::LogLevel::kInfo,
              fmt::format("removed DRAM regions without a writer: {}", human_bytes(freed_bytes)));
    sizing = size_up(options, registry, present_bytes);
    if (!sizing) return tl::unexpected(sizing.error());
  }
  if (sizing->missing_bytes() == 0) return {};
  return base::fail(Code::kExhausted, fmt::format("no room for a DRAM region: {}", sizing->arithmetic));
}

Result<std::unique_ptr<RegionFile>> try_adopt(const OpenOptions& options, const Registry& registry,
                                              const Registry::Entry& entry,
                                              const RegionFile::Options& file_options) {
  TPUSYNC_TRY(make_room(options, registry, entry.memory_bytes));
  return RegionFile::adopt(entry.path, file_options);
}

// The dead regions of the namespace, those that need no resizing first.
std::vector<Registry::Entry> candidates(const Registry& registry, const OpenOptions& options) {
  std::vector<Registry::Entry> found = registry.entries_of(options.name_space);
  std::erase_if(found, [&](const Registry::Entry& entry) { return registry.has_writer(entry.path); });
  const auto needs_resizing = [&](const Registry::Entry& entry) {
    const auto file = RegionFile::read(entry.path, options.name_space);
    return !file || (*file)->geometry() != options.geometry;
  };
  std::stable_partition(found.begin(), found.end(),
                        [&](const auto& entry) { return !needs_resizing(entry); });
  return found;
}

Result<std::unique_ptr<RegionFile>> find_or_make(const OpenOptions& options, const Registry& registry) {
  const RegionFile::Options file_options{.geometry = options.geometry,
                                         .name_space = options.name_space,
                                         .num_threads = options.num_threads,
                                         .numa_node = options.numa_node};
  for (const Registry::Entry& entry : candidates(registry, options)) {
    Result<std::unique_ptr<RegionFile>> file = try_adopt(options, registry, entry, file_options);
    if (file) return file;
    if (file.error().code == Code::kBusy || file.error().code == Code::kNotFound) continue;
    base::log(base::LogLevel::kWarning,
              fmt::format("a DRAM region was not adopted: {}", file.error().message));
    // Nobody can use a damaged one. Others stay as readable peers until their memory is needed.
    if (file.error().code == Code::kCorrupt) registry.remove_if_dead(entry.path);
  }
  TPUSYNC_TRY(make_room(options, registry, 0));
  for (int number = 0; number < kNumRegionsMax; ++number) {
    Result<std::unique_ptr<RegionFile>> file =
        RegionFile::create(registry.path_of(options.name_space, number), file_options);
    if (file || file.error().code != Code::kBusy) return file;
  }
  return base::fail(Code::kExhausted, fmt::format("{} regions of one namespace under {}: no more are allowed",
                                                  kNumRegionsMax, registry.root()));
}

}  // namespace

Status OpenOptions::validate() const {
  TPUSYNC_TRY(geometry.validate());
  if (num_threads < 1 || num_threads > kNumThreadsMax) {
    return base::fail(Code::kInvalid,
                      fmt::format("num_threads: {}, allowed are 1 to {}", num_threads, kNumThreadsMax));
  }
  if (!root.starts_with('/'))
    return base::fail(Code::kInvalid, fmt::format("root: {} is not an absolute path", root));
  return {};
}

Result<std::unique_ptr<Region>> open_region(const OpenOptions& options) {
  TPUSYNC_TRY(options.validate());
  const Result<Registry> registry = Registry::open(options.root);
  if (!registry) return tl::unexpected(registry.error());
  Result<std::unique_ptr<RegionFile>> file = find_or_make(options, *registry);
  if (!file) return tl::unexpected(file.error());
  const std::string path = (*file)->file().path();
  const Result<bool> released = (*file)->release_tail();
  if (released && !*released) {
    base::log(base::LogLevel::kInfo,
              fmt::format("{}: memory behind the last slot stays until its readers go", path));
  }
  Result<std::unique_ptr<Region>> region = Region::open(std::move(*file));
  if (region) {
    base::log(base::LogLevel::kInfo,
              fmt::format("DRAM region {}: {} slots of {}, {} pages adopted", path,
                          options.geometry.num_slots, human_bytes(options.geometry.page_bytes()),
                          metrics::value_of((*region)->samples(), "host_pages_adopted_total")));
  }
  return region;
}

}  // namespace tpusync::host
