#include "tpusync/exec/ticket.h"

#include <fmt/format.h>

#include <cmath>
#include <string_view>

#include "tpusync/binding/bind.h"

namespace tpusync::binding {

using base::Code;

namespace {

constexpr double kTimeoutMaxS = 1e9;  // beyond it a steady clock's arithmetic could overflow

std::string_view exception_name(Code code) {
  switch (code) {
    case Code::kInvalid:
      return "ConfigError";
    case Code::kUnsupported:
      return "UnsupportedError";
    case Code::kDeadline:
      return "DeadlineError";
    case Code::kCancelled:
      return "CancelledError";
    case Code::kIo:
    case Code::kExhausted:
    case Code::kCorrupt:
      return "StorageError";
    default:
      return "TransferError";
  }
}

py::object error_text(const PyTicket& self) {
  if (!self.ticket.done()) return py::none();
  const base::Status status = self.ticket.status();
  if (status) return py::none();
  return py::str(fmt::format("{}: {}", base::code_name(status.error().code), status.error().message));
}

Array<std::uint8_t> outcome_array(const PyTicket& self) {
  if (!self.ticket.done()) raise({Code::kBusy, "the outcomes of a batch exist once its ticket is done"});
  if (!self.outcomes) return Array<std::uint8_t>(0);
  Array<std::uint8_t> out(static_cast<py::ssize_t>(self.outcomes->size()));
  for (std::size_t i = 0; i < self.outcomes->size(); ++i) {
    out.mutable_data()[i] = static_cast<std::uint8_t>((*self.outcomes)[i]);
  }
  return out;
}

}  // namespace

void raise(const base::Error& error) {
  const py::object type =
      py::module_::import("sglang_tpusync.errors").attr(std::string(exception_name(error.code)).c_str());
  PyErr_SetString(type.ptr(), error.message.c_str());
  throw py::error_already_set();
}

exec::Deadline deadline_of(const py::object& timeout_s) {
  if (timeout_s.is_none()) return std::nullopt;
  const double seconds = timeout_s.cast<double>();
  if (!(seconds >= 0 && seconds <= kTimeoutMaxS)) {
    raise({Code::kInvalid, fmt::format("timeout_s: {}, allowed are 0 to {:g}", seconds, kTimeoutMaxS)});
  }
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                std::chrono::duration<double>(seconds));
}

void bind_ticket(py::module_& module) {
  py::tuple names(static_cast<std::size_t>(Code::kIo) + 1);
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = base::code_name(static_cast<Code>(i));
  module.attr("OUTCOME_NAMES") = names;

  py::class_<PyTicket>(module, "Ticket", py::is_final())
      .def_property_readonly("done", [](const PyTicket& self) { return self.ticket.done(); })
      .def(
          "wait",
          [](const PyTicket& self, const py::object& timeout_s) {
            const exec::Deadline deadline = deadline_of(timeout_s);
            const ReleasedGil released;
            return self.ticket.wait(deadline);
          },
          py::arg("timeout_s") = py::none())
      .def("cancel", [](const PyTicket& self) { self.ticket.cancel(); })
      .def("error", &error_text)
      .def("outcomes", &outcome_array);
}

}  // namespace tpusync::binding
