#include "tpusync/host/region_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "tpusync/base/clock.h"

namespace tpusync::host {

using base::Code;
using base::Result;
using base::Status;
using os::Mapping;
using os::SharedFile;

namespace {

Result<RegionHeader> header_of(const SharedFile& file, std::uint64_t size_bytes) {
  std::array<std::byte, kHeaderBytes> bytes;
  const Mapping::Range range{0, kSpanAlignBytes};
  if (size_bytes < kSpanAlignBytes) {
    return base::fail(Code::kCorrupt, fmt::format("{}: {} bytes are no region", file.path(), size_bytes));
  }
  const Result<std::unique_ptr<Mapping>> mapping = Mapping::open(file, std::span(&range, 1), false);
  if (!mapping) return tl::unexpected(mapping.error());
  std::memcpy(bytes.data(), (*mapping)->bytes().data(), bytes.size());
  Result<RegionHeader> header = decode_header(bytes);
  if (!header) {
    return base::fail(header.error().code, fmt::format("{}: {}", file.path(), header.error().message));
  }
  if (header->file_bytes() > size_bytes) {
    return base::fail(Code::kCorrupt, fmt::format("{}: {} bytes, its header asks for {}", file.path(),
                                                  size_bytes, header->file_bytes()));
  }
  return header;
}

Status check_identity(const RegionHeader& header, const RegionFile::Options& options,
                      std::uint64_t align_bytes, const std::string& path) {
  if (header.name_space != options.name_space) {
    return base::fail(Code::kInvalid, fmt::format("{} belongs to another namespace", path));
  }
  if (header.piece_bytes != options.geometry.piece_bytes) {
    return base::fail(Code::kInvalid,
                      fmt::format("{} has pages of {} bytes in {} pieces, wanted are {} in {}", path,
                                  header.page_bytes(), header.piece_bytes.size(),
                                  options.geometry.page_bytes(), options.geometry.piece_bytes.size()));
  }
  if (!fits(header, options.geometry.num_slots, align_bytes)) {
    return base::fail(
        Code::kInvalid,
        fmt::format("{} cannot be given {} slots: it was laid out for {} {}", path,
                    options.geometry.num_slots, header.split ? "at most" : "exactly", header.num_slots_max));
  }
  return {};
}

std::int64_t unix_now_ns() {
  return base::Clock().unix_ns();
}

std::optional<WriterState> newest_state(std::span<const std::byte> table) {
  std::optional<WriterState> newest;
  for (const std::size_t offset : kWriterStateOffset) {
    std::array<std::byte, kWriterStateBytes> copy;
    std::memcpy(copy.data(), table.data() + offset, copy.size());
    const std::optional<WriterState> state = decode_writer_state(copy);
    if (state && (!newest || state->epoch > newest->epoch)) newest = state;
  }
  return newest;
}

}  // namespace

Status RegionFile::map_table(bool write) {
  const Mapping::Range range{0, header_.table_span_bytes()};
  Result<std::unique_ptr<Mapping>> mapping = Mapping::open(*file_, std::span(&range, 1), write);
  if (!mapping) return tl::unexpected(mapping.error());
  table_ = std::move(*mapping);
  return {};
}

Status RegionFile::map_payload(std::uint64_t num_slots, bool write) {
  geometry_ = {header_.piece_bytes, num_slots};
  offsets_ = geometry_.piece_offsets();
  std::vector<Mapping::Range> ranges;
  if (header_.split) {
    for (std::size_t i = 0; i < offsets_.size(); ++i) {
      ranges.push_back({header_.payload_offset(i), header_.piece_bytes[i] * num_slots});
    }
  } else {
    ranges.push_back({header_.payload_offset(0), geometry_.payload_bytes()});
  }
  Result<std::unique_ptr<Mapping>> mapping = Mapping::open(*file_, ranges, write);
  if (!mapping) return tl::unexpected(mapping.error());
  payload_ = std::move(*mapping);
  return {};
}

void RegionFile::write_state(const WriterState& state) {
  state_ = state;
  const std::array<std::byte, kWriterStateBytes> bytes = encode_writer_state(state);
  std::memcpy(table_->bytes().data() + kWriterStateOffset[state.epoch % 2], bytes.data(), bytes.size());
  // seq_cst: a reader that registers itself after we looked for readers reads this state.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

// The common end of create and adopt: maps for writing, and makes this process the writer in the header.
Status RegionFile::begin(const Options& options, const WriterState& previous) {
  TPUSYNC_TRY(map_payload(options.geometry.num_slots, true));
  if (options.numa_node >= 0) {
    TPUSYNC_TRY(payload_->prefer_node(options.numa_node));
  }
  const Result<SharedFile::Info> info = file_->info();
  if (!info) return tl::unexpected(info.error());
  // A region that shrank may have given memory back in the middle of its file: growing looks at all of it.
  needs_populating_ = info->memory_bytes >= header_.table_span_bytes() + geometry_.payload_bytes() &&
                      geometry_.num_slots <= previous.num_slots;
  if (!needs_populating_) {
    TPUSYNC_TRY(table_->populate(0, table_->bytes().size()));
    TPUSYNC_TRY(populate_all(options.num_threads));
  }
  write_state({.epoch = previous.epoch + 1,
               .num_slots = geometry_.num_slots,
               .process_id = static_cast<std::uint32_t>(::getpid()),
               .since_unix_ns = unix_now_ns()});
  return {};
}

Status RegionFile::populate_part(std::size_t part, std::size_t num_parts) const {
  const std::uint64_t size_bytes = payload().size();
  const std::uint64_t part_bytes = base::round_up(size_bytes / num_parts + 1, kSpanAlignBytes);
  const std::uint64_t begin = std::min(part * part_bytes, size_bytes);
  return payload_->populate(begin, std::min(part_bytes, size_bytes - begin));
}

Status RegionFile::populate_all(int num_threads) const {
  const auto num_parts = static_cast<std::size_t>(num_threads);
  std::vector<Status> results(num_parts);
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < num_parts; ++i) {
      threads.emplace_back([this, i, num_parts, &results] { results[i] = populate_part(i, num_parts); });
    }
  }
  for (const Status& result : results) TPUSYNC_TRY(result);
  return {};
}

Result<std::unique_ptr<RegionFile>> RegionFile::create(const std::string& path, const Options& options) {
  TPUSYNC_TRY(options.geometry.validate());
  Result<std::unique_ptr<SharedFile>> file = SharedFile::open(path, SharedFile::Access::kCreate);
  if (!file) return tl::unexpected(file.error());
  const Result<bool> locked = (*file)->try_lock_writer();
  if (!locked) return tl::unexpected(locked.error());
  if (!*locked) return base::fail(Code::kBusy, fmt::format("{} was taken while it was made", path));
  const Result<SharedFile::Info> info = (*file)->info();
  if (!info) return tl::unexpected(info.error());
  const RegionHeader header =
      make_header(options.geometry, options.name_space, info->map_align_bytes, unix_now_ns());
  std::unique_ptr<RegionFile> region(new RegionFile(std::move(*file), header));
  const Status made = [&]() -> Status {
    TPUSYNC_TRY(region->file_->set_size(header.file_bytes()));
    TPUSYNC_TRY(region->map_table(true));
    TPUSYNC_TRY(region->begin(options, WriterState{}));
    return {};
  }();
  if (!made) {
    (void)region->file_->remove_name();
    return tl::unexpected(made.error());
  }
  // The header comes last and its first word last of all: without it the file is nobody's region.
  std::array<std::byte, kHeaderBytes> bytes;
  encode_header(header, bytes);
  std::byte* const to = region->table_->bytes().data();
  std::memcpy(to + sizeof(std::uint64_t), bytes.data() + sizeof(std::uint64_t),
              kWriterStateOffset[0] - sizeof(std::uint64_t));
  std::atomic_ref(*reinterpret_cast<std::uint64_t*>(to))
      .store(base::load_le<std::uint64_t>(bytes.data()), std::memory_order_release);
  return region;
}

Result<std::unique_ptr<RegionFile>> RegionFile::adopt(const std::string& path, const Options& options) {
  TPUSYNC_TRY(options.geometry.validate());
  Result<std::unique_ptr<SharedFile>> file = SharedFile::open(path, SharedFile::Access::kWrite);
  if (!file) return tl::unexpected(file.error());
  const Result<bool> locked = (*file)->try_lock_writer();
  if (!locked) return tl::unexpected(locked.error());
  if (!*locked) return base::fail(Code::kBusy, fmt::format("{} has a living writer", path));
  const Result<SharedFile::Info> info = (*file)->info();
  if (!info) return tl::unexpected(info.error());
  Result<RegionHeader> header = header_of(**file, info->size_bytes);
  if (!header) return tl::unexpected(header.error());
  TPUSYNC_TRY(check_identity(*header, options, info->map_align_bytes, path));
  std::unique_ptr<RegionFile> region(new RegionFile(std::move(*file), std::move(*header)));
  TPUSYNC_TRY(region->map_table(true));
  const std::optional<WriterState> previous = newest_state(region->table_->bytes());
  if (!previous || previous->epoch == kEpochMax) {
    return base::fail(Code::kCorrupt, fmt::format("{}: the marks of its writers are damaged", path));
  }
  TPUSYNC_TRY(region->begin(options, *previous));
  return region;
}

Result<std::unique_ptr<RegionFile>> RegionFile::read(const std::string& path, const Digest& name_space) {
  Result<std::unique_ptr<SharedFile>> file = SharedFile::open(path, SharedFile::Access::kRead);
  if (!file) return tl::unexpected(file.error());
  TPUSYNC_TRY((*file)->enter_readers());
  const Result<SharedFile::Info> info = (*file)->info();
  if (!info) return tl::unexpected(info.error());
  Result<RegionHeader> header = header_of(**file, info->size_bytes);
  if (!header) return tl::unexpected(header.error());
  if (header->name_space != name_space) {
    return base::fail(Code::kInvalid, fmt::format("{} belongs to another namespace", path));
  }
  std::unique_ptr<RegionFile> region(new RegionFile(std::move(*file), std::move(*header)));
  TPUSYNC_TRY(region->map_table(false));
  const std::optional<WriterState> state = region->current_state();
  if (!state)
    return base::fail(Code::kCorrupt, fmt::format("{}: the marks of its writers are damaged", path));
  region->state_ = *state;
  TPUSYNC_TRY(region->map_payload(state->num_slots, false));
  return region;
}

std::optional<WriterState> RegionFile::current_state() const {
  const std::optional<WriterState> state = newest_state(table_->bytes());
  const Result<SharedFile::Info> info = file_->info();
  if (!state || !info || !fits(header_, state->num_slots, info->map_align_bytes)) return std::nullopt;
  return state;
}

SealTable RegionFile::seals() const {
  return {table_->bytes().data() + kHeaderBytes, namespace_seed(header_.name_space)};
}

KeyTable RegionFile::keys() const {
  std::byte* const table = table_->bytes().data();
  return {reinterpret_cast<std::uint32_t*>(table + header_.chain_offset()), geometry_.num_slots,
          reinterpret_cast<std::uint32_t*>(table + header_.bucket_offset()), header_.num_buckets()};
}

std::span<std::byte> RegionFile::piece(index::SlotId slot, std::size_t number) const {
  const std::uint64_t size_bytes = geometry_.piece_bytes[number];
  return payload().subspan(offsets_[number] + index::to_number(slot) * size_bytes, size_bytes);
}

Result<bool> RegionFile::release_tail() {
  if (!header_.split) return true;
  const Result<bool> readers = file_->has_readers();
  if (!readers) return tl::unexpected(readers.error());
  if (*readers) return false;
  const Result<SharedFile::Info> info = file_->info();
  if (!info) return tl::unexpected(info.error());
  for (std::size_t i = 0; i < header_.num_spans(); ++i) {
    const std::uint64_t used =
        base::round_up(header_.piece_bytes[i] * geometry_.num_slots, info->map_align_bytes);
    TPUSYNC_TRY(file_->release(header_.payload_offset(i) + used, header_.payload_span_bytes - used));
  }
  return true;
}

}  // namespace tpusync::host
