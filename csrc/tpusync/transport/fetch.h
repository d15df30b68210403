// Reading the memory of a peer process on this host, where it has said that its regions lie.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>

#include "tpusync/base/error.h"
#include "tpusync/transport/grant.h"
#include "tpusync/wire/frame.h"

namespace tpusync::transport {

// Confined to the thread of its stream.
class Fetcher {
 public:
  // `process` as the kernel names the other side of the Unix socket; 0 or less: nothing can be fetched.
  explicit Fetcher(pid_t process) : process_(process) {}

  // kUnsupported when the memory cannot be read (permission, another container); kBusy at a limit.
  base::Status share(const wire::ShareTable& table);

  // Copies what the entries name into the targets of `landing`, one for each entry. kInvalid for bytes
  // outside a shared region; kIo when not all could be read.
  base::Status fetch(std::span<const wire::OfferEntry> entries, const Landing& landing);

 private:
  struct Shared {
    std::uint64_t address = 0;
    std::uint64_t length = 0;
  };

  const pid_t process_;
  std::unordered_map<std::uint32_t, Shared> shared_;
};

}  // namespace tpusync::transport
