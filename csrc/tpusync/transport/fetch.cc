#include "tpusync/transport/fetch.h"

#include <fmt/format.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace tpusync::transport {

using base::Code;
using base::fail;
using base::Status;

namespace {

constexpr std::size_t kSharesMax = 4096;
constexpr std::size_t kPartsMax = 512;

void* pointer(std::uint64_t address) {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
}

}  // namespace

Status Fetcher::share(const wire::ShareTable& table) {
  if (shared_.size() >= kSharesMax)
    return fail(Code::kBusy, fmt::format("{} regions are shared already", kSharesMax));
  std::byte probe{};
  const iovec here{&probe, 1};
  const iovec there{pointer(table.address), 1};
  if (process_ <= 0 || ::process_vm_readv(process_, &here, 1, &there, 1, 0) != 1) {
    return fail(Code::kUnsupported, fmt::format("the memory of process {} cannot be read here", process_));
  }
  shared_[table.region] = {table.address, table.length};
  return {};
}

Status Fetcher::fetch(std::span<const wire::OfferEntry> entries, const Landing& landing) {
  std::array<iovec, kPartsMax> there;
  for (std::size_t start = 0; start < entries.size(); start += kPartsMax) {
    const std::size_t count = std::min(kPartsMax, entries.size() - start);
    std::size_t wanted = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const wire::OfferEntry& entry = entries[start + i];
      const auto shared = shared_.find(entry.source_region);
      if (shared == shared_.end() || entry.source_offset + entry.target.length > shared->second.length) {
        return fail(Code::kInvalid,
                    fmt::format("region {} offset {} length {} is not shared", entry.source_region,
                                entry.source_offset, entry.target.length));
      }
      there[i] = {pointer(shared->second.address + entry.source_offset), entry.target.length};
      wanted += entry.target.length;
    }
    const ssize_t got =
        ::process_vm_readv(process_, landing.targets.data() + start, count, there.data(), count, 0);
    if (got != static_cast<ssize_t>(wanted)) {
      return fail(Code::kIo, fmt::format("{} of {} bytes were read from process {}: {}", got, wanted,
                                         process_, got < 0 ? std::strerror(errno) : "its memory is gone"));
    }
  }
  return {};
}

}  // namespace tpusync::transport
