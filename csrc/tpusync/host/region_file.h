// A region's file, checked and mapped: where each record and each piece of each page lies.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/host/key_table.h"
#include "tpusync/host/region_format.h"
#include "tpusync/host/seal_table.h"
#include "tpusync/os/mapping.h"
#include "tpusync/os/shared_file.h"

namespace tpusync::host {

// A resource. Immutable; what lies in the memory is between its writer and its readers.
class RegionFile {
 public:
  struct Options {
    Geometry geometry;
    Digest name_space{};
    int num_threads = 1;  // that make memory present
    int numa_node = -1;   // -1: wherever
  };

  // A new file, locked for this process. kBusy: the name is taken. kExhausted: no memory; nothing is left
  // then.
  static base::Result<std::unique_ptr<RegionFile>> create(const std::string& path, const Options& options);

  // The file of a writer that is gone. kBusy: it lives; kInvalid: another namespace or geometry, or a number
  // of slots that it cannot take, all named; kCorrupt: its header is damaged; kUnsupported: of a newer
  // version.
  static base::Result<std::unique_ptr<RegionFile>> adopt(const std::string& path, const Options& options);

  // Somebody's file, for reading beside its writer. Errors as above, never kBusy.
  static base::Result<std::unique_ptr<RegionFile>> read(const std::string& path, const Digest& name_space);

  RegionFile(const RegionFile&) = delete;
  RegionFile& operator=(const RegionFile&) = delete;

  const RegionHeader& header() const { return header_; }
  const Geometry& geometry() const { return geometry_; }
  const WriterState& state() const { return state_; }
  const os::SharedFile& file() const { return *file_; }

  SealTable seals() const;
  KeyTable keys() const;
  std::span<std::byte> payload() const { return payload_->bytes(); }
  std::span<std::byte> piece(index::SlotId slot, std::size_t number) const;
  std::size_t num_pieces() const { return offsets_.size(); }

  // What the writer says of itself now; nothing while the header is damaged.
  std::optional<WriterState> current_state() const;

  // True for a file whose memory is all there, but not yet in this process's page tables: populating it only
  // saves later faults, so that it can be done beside other work.
  bool needs_populating() const { return needs_populating_; }
  // Makes one of `num_parts` equal parts of the payload present. Thread-safe.
  base::Status populate_part(std::size_t part, std::size_t num_parts) const;
  // Gives memory behind the last slot back; false: a reader may look at it, so it stays for now.
  base::Result<bool> release_tail();
  base::Status remove() { return file_->remove_name(); }

 private:
  RegionFile(std::unique_ptr<os::SharedFile> file, RegionHeader header)
      : file_(std::move(file)), header_(std::move(header)) {}
  base::Status map_table(bool write);
  base::Status map_payload(std::uint64_t num_slots, bool write);
  base::Status begin(const Options& options, const WriterState& previous);
  base::Status populate_all(int num_threads) const;
  void write_state(const WriterState& state);

  const std::unique_ptr<os::SharedFile> file_;
  const RegionHeader header_;
  Geometry geometry_;
  WriterState state_;
  std::vector<std::uint64_t> offsets_;
  bool needs_populating_ = false;
  std::unique_ptr<os::Mapping> table_;
  std::unique_ptr<os::Mapping> payload_;
};

}  // namespace tpusync::host
