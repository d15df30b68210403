// The one place where the core speaks to people. Rare, whole sentences; never once per page.
#pragma once

#include <functional>
#include <string_view>

namespace tpusync::base {

enum class LogLevel : unsigned char { kDebug, kInfo, kWarning, kError };

// Called from any thread, one call at a time. Must not block for long and must not log itself.
using LogSink = std::function<void(LogLevel, std::string_view message)>;

// Replaces the sink of the process; an empty one restores the default, standard error. Thread-safe: once it
// returns, the old sink is not running and will not be called again.
void set_log_sink(LogSink sink);

// Thread-safe.
void log(LogLevel level, std::string_view message);

}  // namespace tpusync::base
