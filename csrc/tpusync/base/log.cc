#include "tpusync/base/log.h"

#include <cstdio>
#include <mutex>

namespace tpusync::base {

namespace {

struct Facade {
  std::mutex mutex;
  LogSink sink;
};

// Leaked on purpose: threads may log while the process ends.
Facade& facade() {
  static Facade* const instance = new Facade;
  return *instance;
}

const char* name_of(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "log";
}

}  // namespace

void set_log_sink(LogSink sink) {
  std::lock_guard lock(facade().mutex);
  facade().sink = std::move(sink);
}

void log(LogLevel level, std::string_view message) {
  std::lock_guard lock(facade().mutex);
  if (facade().sink) {
    facade().sink(level, message);
  } else {
    std::fprintf(stderr, "tpusync %s: %.*s\n", name_of(level), static_cast<int>(message.size()),
                 message.data());
  }
}

}  // namespace tpusync::base
