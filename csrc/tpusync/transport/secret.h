// The shared secret of a deployment, read from its file.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "tpusync/base/error.h"

namespace tpusync::transport {

using Secret = std::vector<std::byte>;

// kInvalid when `path` is no regular file or cannot be read, may be written by others, or holds fewer than 16
// or more than 4096 bytes.
base::Result<Secret> read_secret(const std::string& path);

}  // namespace tpusync::transport
