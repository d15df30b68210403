#include "tpusync/base/log.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tpusync::base {
namespace {

TEST(Log, GoesToTheSinkUntilItIsReplaced) {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel level, std::string_view message) {
    EXPECT_EQ(level, LogLevel::kWarning);
    lines.emplace_back(message);
  });
  log(LogLevel::kWarning, "one");
  set_log_sink({});
  log(LogLevel::kDebug, "two, on standard error");
  EXPECT_EQ(lines, std::vector<std::string>{"one"});
}

}  // namespace
}  // namespace tpusync::base
