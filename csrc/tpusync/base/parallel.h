// A loop whose rounds may run at once. Rooms that own no threads ask their caller for one.
#pragma once

#include <cstddef>
#include <functional>

namespace tpusync::base {

// Thread-compatible. run() returns when every round has run.
class ParallelFor {
 public:
  virtual ~ParallelFor() = default;

  // How many rounds can run at once, at least 1.
  virtual std::size_t width() const = 0;

  // Calls body(i) once for each i in [0, count), in any order, on any thread.
  virtual void run(std::size_t count, const std::function<void(std::size_t)>& body) = 0;
};

// One round after the other, on the calling thread.
class SerialFor final : public ParallelFor {
 public:
  std::size_t width() const override { return 1; }
  void run(std::size_t count, const std::function<void(std::size_t)>& body) override {
    for (std::size_t i = 0; i < count; ++i) body(i);
  }
};

}  // namespace tpusync::base
