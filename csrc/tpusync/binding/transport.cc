#include <fmt/format.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "tpusync/binding/arguments.h"
#include "tpusync/transport/endpoint.h"

namespace tpusync::binding {

using base::Code;
using transport::Endpoint;
using transport::Event;
using transport::Options;

namespace {

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
  auto grant = [&] {
    const ReleasedGil released;
    return self.open_grant(std::move(ranges), id);
  }();
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
    const ReleasedGil released;
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
    const ReleasedGil released;
    return self.connect(addresses, deadline);
  }();
  return unwrap(std::move(peer));
}

std::vector<Event> receive(Endpoint& self, std::size_t count_max, const py::object& timeout_s) {
  const exec::Deadline deadline = deadline_of(timeout_s);
  const ReleasedGil released;
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

// One option of an endpoint by its name.
template <auto Member>
void set(Options& options, const py::handle& value) {
  options.*Member = value.cast<std::remove_reference_t<decltype(options.*Member)>>();
}

struct Option {
  std::string_view name;
  void (*set)(Options&, const py::handle&);
};

constexpr Option kOptions[] = {{"bind", &set<&Options::bind>},
                               {"source", &set<&Options::source>},
                               {"secret_file", &set<&Options::secret_file>},
                               {"allow_unauthenticated", &set<&Options::allow_unauthenticated>},
                               {"num_streams", &set<&Options::num_streams>},
                               {"num_io_threads", &set<&Options::num_io_threads>},
                               {"frame_bytes", &set<&Options::frame_bytes>},
                               {"checksum", &set<&Options::checksum>},
                               {"same_host", &set<&Options::same_host>},
                               {"rate_bytes_per_s_max", &set<&Options::rate_bytes_per_s_max>},
                               {"inflight_bytes_max", &set<&Options::inflight_bytes_max>},
                               {"queued_bytes_max", &set<&Options::queued_bytes_max>},
                               {"queued_transfers_max", &set<&Options::queued_transfers_max>},
                               {"inbox_messages_max", &set<&Options::inbox_messages_max>},
                               {"inbox_bytes_max", &set<&Options::inbox_bytes_max>},
                               {"num_peers_max", &set<&Options::num_peers_max>},
                               {"num_handshakes_max", &set<&Options::num_handshakes_max>},
                               {"num_grants_max", &set<&Options::num_grants_max>},
                               {"heartbeat_s", &set<&Options::heartbeat_s>},
                               {"silence_s", &set<&Options::silence_s>},
                               {"progress_s", &set<&Options::progress_s>},
                               {"handshake_s", &set<&Options::handshake_s>}};

Options options_of(const py::kwargs& values) {
  Options options;
  for (const auto& [key, value] : values) {
    const auto name = key.cast<std::string>();
    const auto* option = std::find_if(std::begin(kOptions), std::end(kOptions),
                                      [&](const Option& one) { return one.name == name; });
    if (option == std::end(kOptions)) throw py::type_error(fmt::format("Endpoint has no option '{}'", name));
    try {
      option->set(options, value);
    } catch (const py::cast_error&) {
      raise({Code::kInvalid,
             fmt::format("{}: {} is no value for it", name, std::string(py::str(py::repr(value))))});
    }
  }
  return options;
}

Holder<Endpoint> open_endpoint(const py::kwargs& values) {
  const Options options = options_of(values);
  auto endpoint = [&] {
    const ReleasedGil released;
    return Endpoint::open(options);
  }();
  return Holder<Endpoint>(unwrap(std::move(endpoint)).release());
}

}  // namespace

void bind_transport(py::module_& module) {
  py::class_<Event>(module, "TransportEvent", py::is_final())
      .def_property_readonly(
          "kind", [](const Event& self) { return self.kind == Event::Kind::kMessage ? "message" : "lost"; })
      .def_readonly("peer", &Event::peer)
      .def_property_readonly("message", [](const Event& self) { return id_bytes(self.message); })
      .def_readonly("reason", &Event::reason);
  py::class_<Endpoint, Holder<Endpoint>>(module, "Endpoint", py::is_final())
      .def(py::init(&open_endpoint))
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
      .def("stats", [](const Endpoint& self) { return dict_of(self.samples()); })
      .def("close", [](Endpoint& self) { self.close(); }, py::call_guard<ReleasedGil>());
}

}  // namespace tpusync::binding
