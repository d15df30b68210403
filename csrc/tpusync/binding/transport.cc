#include <fmt/format.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "tpusync/binding/bind.h"
#include "tpusync/transport/endpoint.h"

namespace tpusync::binding {

using base::Code;
using transport::Endpoint;
using transport::Event;
using transport::Options;

namespace {

// Closing waits for streams, which must not hold up the rest of Python.
struct CloseWithoutGil {
  void operator()(Endpoint* endpoint) const {
    py::gil_scoped_release release;
    delete endpoint;
  }
};
using Holder = std::unique_ptr<Endpoint, CloseWithoutGil>;

template <typename Id>
py::bytes id_bytes(const Id& id) {
  return py::bytes(reinterpret_cast<const char*>(id.data()), id.size());
}

std::optional<wire::EndpointId> holder_of(const std::optional<py::bytes>& holder) {
  if (!holder) return std::nullopt;
  const std::string_view text = *holder;
  wire::EndpointId id;
  if (text.size() != id.size()) {
    raise({Code::kInvalid,
           fmt::format("holder: {} bytes, the id of an endpoint has {}", text.size(), id.size())});
  }
  std::memcpy(id.data(), text.data(), id.size());
  return id;
}

std::size_t common_length(std::initializer_list<py::array> arrays) {
  for (const py::array& array : arrays) {
    if (array.ndim() != 1 || array.size() != arrays.begin()->size()) {
      throw py::type_error("the arrays must be one-dimensional and of one length");
    }
  }
  return static_cast<std::size_t>(arrays.begin()->size());
}

transport::GrantId open_grant(Endpoint& self, const Array<std::uint32_t>& regions,
                              const Array<std::uint64_t>& offsets, const Array<std::uint64_t>& lengths,
                              const std::optional<py::bytes>& holder) {
  std::vector<transport::Range> ranges(common_length({regions, offsets, lengths}));
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    ranges[i] = {regions.data()[i], offsets.data()[i], lengths.data()[i]};
  }
  const auto id = holder_of(holder);
  py::gil_scoped_release release;
  auto grant = self.open_grant(std::move(ranges), id);
  py::gil_scoped_acquire acquire;
  return unwrap(std::move(grant));
}

PyTicket submit_write(Endpoint& self, transport::PeerId peer, transport::GrantId grant,
                      const Array<std::uint64_t>& addresses, const Array<std::uint32_t>& regions,
                      const Array<std::uint64_t>& offsets, const Array<std::uint64_t>& lengths,
                      const py::object& timeout_s) {
  std::vector<transport::Piece> pieces(common_length({addresses, regions, offsets, lengths}));
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    pieces[i] = {reinterpret_cast<const std::byte*>(addresses.data()[i]), regions.data()[i],
                 offsets.data()[i], lengths.data()[i]};
  }
  const exec::Deadline deadline = deadline_of(timeout_s);
  base::Result<exec::Ticket> ticket = [&] {
    py::gil_scoped_release release;
    return self.submit_write(peer, grant, std::move(pieces), deadline);
  }();
  return {unwrap(std::move(ticket)), nullptr};
}

PyTicket submit_message(Endpoint& self, transport::PeerId peer, const py::bytes& message) {
  const std::string_view text = message;
  return {unwrap(self.submit_message(peer, std::as_bytes(std::span(text)))), nullptr};
}

transport::PeerId connect(Endpoint& self, const std::vector<std::string>& addresses,
                          const py::object& timeout_s) {
  const exec::Deadline deadline = deadline_of(timeout_s);
  base::Result<transport::PeerId> peer = [&] {
    py::gil_scoped_release release;
    return self.connect(addresses, deadline);
  }();
  return unwrap(std::move(peer));
}

std::vector<Event> receive(Endpoint& self, std::size_t count_max, const py::object& timeout_s) {
  const exec::Deadline deadline = deadline_of(timeout_s);
  py::gil_scoped_release release;
  return self.receive(count_max, deadline);
}

py::list peers(const Endpoint& self) {
  py::list out;
  for (const transport::PeerInfo& peer : self.peers()) {
    py::dict one;
    one["id"] = peer.id;
    one["endpoint"] = id_bytes(peer.endpoint);
    one["remote"] = peer.remote;
    one["same_host"] = peer.same_host;
    one["queued_bytes"] = peer.queued_bytes;
    out.append(std::move(one));
  }
  return out;
}

py::dict stats(const Endpoint& self) {
  py::dict out;
  for (const auto& [name, value] : self.stats()) out[name] = value;
  return out;
}

template <typename T>
void take(const py::kwargs& values, const char* name, T& out) {
  if (values.contains(name)) out = values[name].cast<T>();
}

Options options_of(const py::kwargs& values) {
  Options o;
  take(values, "bind", o.bind);
  take(values, "source", o.source);
  take(values, "secret_file", o.secret_file);
  take(values, "allow_unauthenticated", o.allow_unauthenticated);
  take(values, "num_streams", o.num_streams);
  take(values, "num_io_threads", o.num_io_threads);
  take(values, "frame_bytes", o.frame_bytes);
  take(values, "checksum", o.checksum);
  take(values, "same_host", o.same_host);
  take(values, "rate_bytes_per_s_max", o.rate_bytes_per_s_max);
  take(values, "inflight_bytes_max", o.inflight_bytes_max);
  take(values, "queued_bytes_max", o.queued_bytes_max);
  take(values, "queued_transfers_max", o.queued_transfers_max);
  take(values, "inbox_messages_max", o.inbox_messages_max);
  take(values, "num_peers_max", o.num_peers_max);
  take(values, "num_handshakes_max", o.num_handshakes_max);
  take(values, "num_grants_max", o.num_grants_max);
  take(values, "heartbeat_s", o.heartbeat_s);
  take(values, "silence_s", o.silence_s);
  take(values, "progress_s", o.progress_s);
  take(values, "handshake_s", o.handshake_s);
  return o;
}

constexpr const char* kOptionNames[] = {"bind",
                                        "source",
                                        "secret_file",
                                        "allow_unauthenticated",
                                        "num_streams",
                                        "num_io_threads",
                                        "frame_bytes",
                                        "checksum",
                                        "same_host",
                                        "rate_bytes_per_s_max",
                                        "inflight_bytes_max",
                                        "queued_bytes_max",
                                        "queued_transfers_max",
                                        "inbox_messages_max",
                                        "num_peers_max",
                                        "num_handshakes_max",
                                        "num_grants_max",
                                        "heartbeat_s",
                                        "silence_s",
                                        "progress_s",
                                        "handshake_s"};

Holder make_endpoint(const py::kwargs& values) {
  for (const auto& [key, value] : values) {
    const auto name = key.cast<std::string>();
    const bool known = std::any_of(std::begin(kOptionNames), std::end(kOptionNames),
                                   [&](const char* option) { return name == option; });
    if (!known) throw py::type_error(fmt::format("Endpoint has no option '{}'", name));
  }
  return Holder(unwrap(Endpoint::open(options_of(values))).release());
}

}  // namespace

void bind_transport(py::module_& module) {
  py::class_<Event>(module, "TransportEvent", py::is_final())
      .def_property_readonly(
          "kind", [](const Event& self) { return self.kind == Event::Kind::kMessage ? "message" : "lost"; })
      .def_readonly("peer", &Event::peer)
      .def_property_readonly("message", [](const Event& self) { return id_bytes(self.message); })
      .def_readonly("reason", &Event::reason);
  py::class_<Endpoint, Holder>(module, "Endpoint", py::is_final())
      .def(py::init(&make_endpoint))
      .def_property_readonly("id", [](const Endpoint& self) { return id_bytes(self.id()); })
      .def_property_readonly("addresses",
                             [](const Endpoint& self) { return py::tuple(py::cast(self.addresses())); })
      .def(
          "register_region",
          [](Endpoint& self, std::uint64_t address, std::uint64_t length) {
            return unwrap(self.register_region(reinterpret_cast<void*>(address), length));
          },
          py::arg("address"), py::arg("length"))
      .def(
          "release_region",
          [](Endpoint& self, transport::RegionId region) { unwrap(self.release_region(region)); },
          py::arg("region"))
      .def("open_grant", &open_grant, py::arg("regions").noconvert(), py::arg("offsets").noconvert(),
           py::arg("lengths").noconvert(), py::arg("holder") = py::none())
      .def(
          "revoke_grant",
          [](Endpoint& self, transport::GrantId grant) {
            return PyTicket{self.revoke_grant(grant), nullptr};
          },
          py::arg("grant"))
      .def("connect", &connect, py::arg("addresses"), py::arg("timeout_s") = py::none())
      .def(
          "disconnect", [](Endpoint& self, transport::PeerId peer) { unwrap(self.disconnect(peer)); },
          py::arg("peer"))
      .def("submit_write", &submit_write, py::arg("peer"), py::arg("grant"), py::arg("addresses").noconvert(),
           py::arg("regions").noconvert(), py::arg("offsets").noconvert(), py::arg("lengths").noconvert(),
           py::arg("timeout_s") = py::none())
      .def("submit_message", &submit_message, py::arg("peer"), py::arg("message"))
      .def("receive", &receive, py::arg("count_max") = 64, py::arg("timeout_s") = py::none())
      .def("peers", &peers)
      .def("stats", &stats)
      .def("close", [](Endpoint& self) { self.close(); }, py::call_guard<py::gil_scoped_release>());
}

}  // namespace tpusync::binding
