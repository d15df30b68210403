#include "tpusync/base/error.h"

#include <fmt/format.h>

#include <cerrno>
#include <system_error>

namespace tpusync::base {

std::string_view code_name(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kNotFound:
      return "not_found";
    case Code::kBusy:
      return "busy";
    case Code::kExhausted:
      return "exhausted";
    case Code::kCorrupt:
      return "corrupt";
    case Code::kDisconnected:
      return "disconnected";
    case Code::kDeadline:
      return "deadline";
    case Code::kCancelled:
      return "cancelled";
    case Code::kInvalid:
      return "invalid";
    case Code::kUnsupported:
      return "unsupported";
    case Code::kIo:
      return "io";
  }
  return "unknown";
}

tl::unexpected<Error> fail_errno(std::string_view what, int error_number) {
  const Code code = error_number == ENOSPC || error_number == EDQUOT ? Code::kExhausted : Code::kIo;
  return fail(code, fmt::format("{}: {}", what, std::generic_category().message(error_number)));
}

}  // namespace tpusync::base
