#include "tpusync/transport/secret.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tpusync/transport/socket.h"
#include "tpusync/wire/auth.h"

namespace tpusync::transport {

using base::Code;
using base::fail;

namespace {

bool is_space(std::byte b) {
  const char c = static_cast<char>(b);
  return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

void trim(Secret& secret) {
  while (!secret.empty() && is_space(secret.back())) secret.pop_back();
  std::size_t start = 0;
  while (start < secret.size() && is_space(secret[start])) ++start;
  secret.erase(secret.begin(), secret.begin() + static_cast<std::ptrdiff_t>(start));
}

}  // namespace

base::Result<Secret> read_secret(const std::string& path) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a pipe must not hold us
  struct stat info{};
  if (!file.valid() || ::fstat(file.get(), &info) != 0) {
    return fail(Code::kInvalid, fmt::format("secret_file {}: {}", path, std::strerror(errno)));
  }
  if (!S_ISREG(info.st_mode)) return fail(Code::kInvalid, fmt::format("secret_file {}: not a file", path));
  if ((info.st_mode & S_IWOTH) != 0)
    return fail(Code::kInvalid, fmt::format("secret_file {}: anybody may write it", path));
  Secret secret(wire::kSecretBytesMax + 64);
  const ssize_t count = ::read(file.get(), secret.data(), secret.size());
  if (count < 0) return fail(Code::kInvalid, fmt::format("secret_file {}: {}", path, std::strerror(errno)));
  secret.resize(static_cast<std::size_t>(count));
  trim(secret);
  if (secret.size() < wire::kSecretBytesMin || secret.size() > wire::kSecretBytesMax) {
    return fail(Code::kInvalid, fmt::format("secret_file {}: {} bytes, allowed are {} to {}", path,
                                            secret.size(), wire::kSecretBytesMin, wire::kSecretBytesMax));
  }
  return secret;
}

}  // namespace tpusync::transport
