// Errors as values: what a call may answer instead of its result.
#pragma once

#include <string>
#include <string_view>
#include <tl/expected.hpp>
#include <utility>

namespace tpusync::base {

// Codes are named for what the caller does next.
enum class Code : unsigned char {
  kOk = 0,
  kNotFound,      // a miss: go on without
  kBusy,          // a named limit is reached now: try later or go on without
  kExhausted,     // no space or budget is left: go on without
  kCorrupt,       // bytes were not what was written: a miss, counted
  kDisconnected,  // the other side is gone
  kDeadline,      // the time given has passed
  kCancelled,     // the caller or a close asked for it
  kInvalid,       // an argument or a configured value is wrong
  kUnsupported,   // this build, kernel or file system cannot do it
  kIo,            // the operating system reported an error
};

std::string_view code_name(Code code);

// A value. The message says what failed, on which key, file or peer, and with which numbers.
struct [[nodiscard]] Error {
  Code code;
  std::string message;
};

template <typename T>
using Result = tl::expected<T, Error>;
using Status = Result<void>;

inline tl::unexpected<Error> fail(Code code, std::string message) {
  return tl::unexpected<Error>(Error{code, std::move(message)});
}

// kIo (kExhausted for ENOSPC and EDQUOT) with `what` and the text of `error_number`, an errno value.
tl::unexpected<Error> fail_errno(std::string_view what, int error_number);

// Returns the error of `expression` from the calling function, if it has one.
#define TPUSYNC_TRY(expression)                                     \
  do {                                                              \
    auto&& tpusync_try_result = (expression);                       \
    if (!tpusync_try_result) {                                      \
      return tl::unexpected(std::move(tpusync_try_result).error()); \
    }                                                               \
  } while (false)

}  // namespace tpusync::base
