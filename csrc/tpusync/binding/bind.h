// What the binding's files share: one bind_* function per room, tickets, and errors as Python exceptions.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tpusync/base/error.h"
#include "tpusync/exec/ticket.h"

namespace tpusync::binding {

namespace py = pybind11;

void bind_device(py::module_& module);
void bind_evict(py::module_& module);
void bind_flash(py::module_& module);
void bind_host(py::module_& module);
void bind_layout(py::module_& module);
void bind_log(py::module_& module);
void bind_store(py::module_& module);
void bind_ticket(py::module_& module);
void bind_transport(py::module_& module);

// Runs what follows in its scope without the GIL. A thread that comes back after the interpreter has ended,
// as daemon threads do, never gets it again: Python unwinds such a thread by force, which no destructor on
// its way survives, and the process would abort. It stays here instead, until the process is gone.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;
  ~ReleasedGil() noexcept(false) {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      while (true) ::pause();
    }
  }

 private:
  PyThreadState* const state_;
};

// Throws the exception of sglang_tpusync.errors that stands for the code. Call with the GIL held.
[[noreturn]] void raise(const base::Error& error);

template <typename T>
T unwrap(base::Result<T> result) {
  if (!result) raise(result.error());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

// One code per page of a batch. Written by the workers, read once the ticket is done.
using Outcomes = std::shared_ptr<const std::vector<base::Code>>;

struct PyTicket {
  exec::Ticket ticket;
  Outcomes outcomes;  // null for work that is no batch
};

// The deadline `timeout_s` from now; none for None. Throws ConfigError for a negative or non-finite value.
exec::Deadline deadline_of(const py::object& timeout_s);

// An argument that must be exactly this: no silent conversion, hence no copy that outlives its view.
template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
std::span<const T> view(const Array<T>& array) {
  return {array.data(), static_cast<std::size_t>(array.size())};
}

}  // namespace tpusync::binding
