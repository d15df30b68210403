#include "tpusync/os/file.h"

namespace tpusync::os {

base::Result<std::size_t> read_bytes(const File& file, std::span<std::byte> bytes, std::uint64_t offset) {
  const iovec piece{bytes.data(), bytes.size()};
  return file.read({&piece, 1}, offset);
}

base::Status write_bytes(File& file, std::span<const std::byte> bytes, std::uint64_t offset) {
  const iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
  return file.write({&piece, 1}, offset);
}

base::Result<std::string> read_text(FileSystem& files, const std::string& path, std::size_t limit_bytes) {
  auto file = files.open(path, {.write = false});
  if (!file) return tl::unexpected(std::move(file).error());
  std::string text(limit_bytes, '\0');
  auto num_read = read_bytes(**file, std::as_writable_bytes(std::span(text)), 0);
  if (!num_read) return tl::unexpected(std::move(num_read).error());
  text.resize(*num_read);
  return text;
}

base::Status replace_text(FileSystem& files, const std::string& path, std::string_view text) {
  const std::string temporary = path + std::string(kTemporarySuffix);
  {
    auto file = files.open(temporary, {.create = true});
    if (!file) return tl::unexpected(std::move(file).error());
    TPUSYNC_TRY((*file)->truncate(0));
    TPUSYNC_TRY(write_bytes(**file, std::as_bytes(std::span(text)), 0));
  }
  return files.rename(temporary, path);
}

}  // namespace tpusync::os
