#include "tpusync/base/log.h"

#include <pybind11/stl.h>

#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tpusync/binding/bind.h"

namespace tpusync::binding {

namespace {

using Line = std::pair<std::string, std::string>;  // level, message
constexpr std::size_t kNumLinesMax = 256;

// Lines wait here for Python to take them: a thread of the core never waits for the GIL in order to speak.
class LogQueue {
 public:
  void put(base::LogLevel level, std::string_view message) {
    static constexpr const char* kNames[] = {"debug", "info", "warning", "error"};
    std::lock_guard lock(mutex_);
    if (lines_.size() == kNumLinesMax) lines_.pop_front();  // the newest tell most
    lines_.emplace_back(kNames[static_cast<std::size_t>(level)], message);
  }
  std::vector<Line> take() {
    std::lock_guard lock(mutex_);
    std::vector<Line> taken(std::make_move_iterator(lines_.begin()), std::make_move_iterator(lines_.end()));
    lines_.clear();
    return taken;
  }

 private:
  std::mutex mutex_;
  std::deque<Line> lines_;
};

std::vector<Line> take_log_lines() {
  // Leaked on purpose, as the facade is.
  static LogQueue* const queue = [] {
    auto* made = new LogQueue;
    base::set_log_sink([made](base::LogLevel level, std::string_view message) { made->put(level, message); });
    return made;
  }();
  return queue->take();
}

}  // namespace

void bind_log(py::module_& module) {
  module.def("take_log_lines", &take_log_lines, py::call_guard<ReleasedGil>());
}

}  // namespace tpusync::binding
