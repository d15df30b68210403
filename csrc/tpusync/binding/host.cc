#include <pybind11/stl.h>

#include <filesystem>
#include <optional>

#include "tpusync/binding/arguments.h"
#include "tpusync/host/open_region.h"
#include "tpusync/tier/stack.h"

namespace tpusync::binding {

using base::Code;
using host::Region;
using index::PageKey;
using index::SlotId;
using tier::Stack;

namespace {

Holder<Region> open_region(const std::string& root, const py::bytes& name_space,
                           const std::vector<std::uint64_t>& piece_bytes, std::uint64_t num_slots,
                           std::optional<std::uint64_t> cap_bytes, std::uint64_t reserve_bytes, int numa_node,
                           int num_threads) {
  host::OpenOptions options;
  options.root = root.empty() ? root : std::filesystem::absolute(root).lexically_normal().string();
  options.name_space = digest_of(name_space);
  options.geometry = {.piece_bytes = piece_bytes, .num_slots = num_slots};
  options.cap_bytes = cap_bytes;
  options.reserve_bytes = reserve_bytes;
  options.numa_node = numa_node;
  options.num_threads = num_threads;
  auto region = [&] {
    const ReleasedGil released;
    return host::open_region(options);
  }();
  return Holder<Region>(unwrap(std::move(region)).release());
}

py::object alloc(Region& region, std::size_t count) {
  const std::vector<SlotId> slots = [&] {
    const ReleasedGil released;
    return region.alloc(count);
  }();
  if (slots.size() != count) return py::none();
  Array<std::int64_t> answer(static_cast<py::ssize_t>(count));
  for (std::size_t i = 0; i < count; ++i) answer.mutable_data()[i] = index::to_number(slots[i]);
  return answer;
}

void free_slots(Region& region, const Array<std::int64_t>& slots) {
  const std::vector<SlotId> list = copy_slots(slots);
  const base::Status status = [&] {
    const ReleasedGil released;
    return region.free(list);
  }();
  if (!status) raise(status.error());
}

// The pool's memory. The array keeps the region alive.
py::array_t<std::uint8_t> payload(const py::object& self) {
  const auto bytes = self.cast<Region&>().payload();
  return py::array_t<std::uint8_t>(static_cast<py::ssize_t>(bytes.size()),
                                   reinterpret_cast<const std::uint8_t*>(bytes.data()), self);
}

std::size_t match(Region& region, const py::bytes& keys, const py::bytes& prefix) {
  const auto key_list = copy_keys(keys, "keys");
  const auto prefix_list = copy_keys(prefix, "prefix");
  const ReleasedGil released;
  const std::size_t num_found = region.match(key_list);
  region.touch(prefix_list, std::span(key_list).first(num_found));
  return num_found;
}

Array<bool> contains(const Region& region, const py::bytes& keys) {
  const auto key_list = copy_keys(keys, "keys");
  Array<bool> answer(static_cast<py::ssize_t>(key_list.size()));
  for (std::size_t i = 0; i < key_list.size(); ++i) answer.mutable_data()[i] = region.contains(key_list[i]);
  return answer;
}

template <typename Call>
auto without_gil(const Call& call) {
  const ReleasedGil released;
  return call();
}

tier::SpillPolicy policy_of(const std::string& name) {
  using tier::SpillPolicy;
  if (name == "never") return SpillPolicy::kNever;
  if (name == "through") return SpillPolicy::kThrough;
  if (name == "selective") return SpillPolicy::kSelective;
  if (name == "lazy") return SpillPolicy::kLazy;
  raise({Code::kInvalid, fmt::format("spill: '{}', allowed are never, through, selective, lazy", name)});
}

// Limits promises if all figures are given and it is not switched off; some of them are no basis for it.
tier::PromiseOptions promises_of(std::optional<bool> limit, std::optional<double> deadline_base_s,
                                 std::optional<double> deadline_per_page_s,
                                 std::optional<double> recompute_per_page_s) {
  const struct {
    const char* key;
    const std::optional<double>& value;
  } figures[] = {{"deadline_base_s", deadline_base_s},
                 {"deadline_per_page_s", deadline_per_page_s},
                 {"recompute_per_page_s", recompute_per_page_s}};
  const char* given = limit.value_or(false) ? "limit_promises" : nullptr;
  for (const auto& [key, value] : figures) {
    if (value) given = key;
  }
  if (given == nullptr) return {};
  for (const auto& [key, value] : figures) {
    if (value) continue;
    raise({Code::kInvalid,
           fmt::format("{}: None beside {}, allowed are 0 to 86400 (promises are limited by three figures: "
                       "deadline_base_s, deadline_per_page_s, recompute_per_page_s)",
                       key, given)});
  }
  return {.enabled = limit.value_or(true),
          .deadline_base_s = *deadline_base_s,
          .deadline_per_page_s = *deadline_per_page_s,
          .recompute_per_page_s = *recompute_per_page_s};
}

Holder<Stack> open_stack(Region& region, flash::FlashStore* store, const std::string& spill,
                         int num_copy_threads, double pin_lifetime_s, std::optional<bool> limit_promises,
                         std::optional<double> deadline_base_s, std::optional<double> deadline_per_page_s,
                         std::optional<double> recompute_per_page_s) {
  tier::StackOptions options;
  options.num_copy_threads = num_copy_threads;
  if (!(pin_lifetime_s >= 0 && pin_lifetime_s <= 3600)) {
    raise({Code::kInvalid, fmt::format("pin_lifetime_s: {}, allowed are 0 to 3600", pin_lifetime_s)});
  }
  options.pin_lifetime = std::chrono::milliseconds(static_cast<std::int64_t>(pin_lifetime_s * 1000));
  options.spill.policy = policy_of(spill);
  options.promises = promises_of(limit_promises, deadline_base_s, deadline_per_page_s, recompute_per_page_s);
  auto stack = without_gil([&] { return Stack::open(options, region, store); });
  return Holder<Stack>(unwrap(std::move(stack)).release());
}

// Keys and the slots they belong to: as many of the one as of the other.
std::vector<SlotId> slots_for(const std::vector<PageKey>& keys, const Array<std::int64_t>& slots) {
  std::vector<SlotId> list = copy_slots(slots);
  if (list.size() != keys.size()) {
    raise({Code::kInvalid, fmt::format("slots: {} of them for {} keys", list.size(), keys.size())});
  }
  return list;
}

template <typename Seal>
Array<std::uint8_t> seal_pages(const py::bytes& keys, const py::bytes& prefix,
                               const Array<std::int64_t>& slots, const Seal& seal) {
  const auto key_list = copy_keys(keys, "keys");
  const auto prefix_list = copy_keys(prefix, "prefix");
  const auto slot_list = slots_for(key_list, slots);
  return array_of(without_gil([&] { return seal(prefix_list, key_list, slot_list); }));
}

py::tuple tuple_of(const Stack::Dropped& dropped) {
  return py::make_tuple(dropped.num_dram, dropped.num_flash);
}

py::tuple match_tiers(Stack& stack, const py::bytes& keys, const py::bytes& prefix) {
  const auto key_list = copy_keys(keys, "keys");
  const auto prefix_list = copy_keys(prefix, "prefix");
  const Stack::Match found = without_gil([&] { return stack.match(key_list, prefix_list); });
  return py::make_tuple(found.num_pages, found.num_own, found.num_peer, found.num_flash);
}

PyTicket submit_get(Stack& stack, const py::bytes& keys, const py::bytes& prefix,
                    const Array<std::uint64_t>& addresses, const std::optional<Array<std::int64_t>>& slots,
                    const py::object& timeout_s) {
  const auto key_list = copy_keys(keys, "keys");
  const auto prefix_list = copy_keys(prefix, "prefix");
  const std::vector<SlotId> slot_list = slots ? copy_slots(*slots) : std::vector<SlotId>();
  const Stack::Get get{.keys = key_list,
                       .prefix = prefix_list,
                       .addresses = view(addresses),
                       .slots = slot_list,
                       .deadline = deadline_of(timeout_s)};
  flash::BatchTicket ticket = unwrap(without_gil([&] { return stack.submit_get(get); }));
  return {std::move(ticket.ticket), std::move(ticket.outcomes)};
}

std::unique_ptr<tier::Promised> promise(Stack& stack, const py::bytes& keys, const py::bytes& prefix,
                                        const py::object& timeout_s) {
  const auto key_list = copy_keys(keys, "keys");
  const auto prefix_list = copy_keys(prefix, "prefix");
  const exec::Deadline deadline = deadline_of(timeout_s);
  return without_gil([&] { return stack.promise(key_list, prefix_list, deadline); });
}

void bind_region(py::module_& module) {
  const auto release_gil = py::call_guard<ReleasedGil>();
  py::class_<Region, Holder<Region>>(module, "HostRegion", py::is_final())
      .def(py::init(&open_region), py::kw_only(), py::arg("root"), py::arg("namespace"),
           py::arg("piece_bytes"), py::arg("num_slots"), py::arg("cap_bytes") = py::none(),
           py::arg("reserve_bytes") = std::uint64_t{1} << 30, py::arg("numa_node") = -1,
           py::arg("num_threads") = 4)
      .def_property_readonly("path", [](const Region& self) { return self.file().file().path(); })
      .def_property_readonly("num_slots", [](const Region& self) { return self.geometry().num_slots; })
      .def_property_readonly("page_bytes", [](const Region& self) { return self.geometry().page_bytes(); })
      .def_property_readonly("available", &Region::num_available)
      .def("memory", &payload)
      .def("alloc", &alloc, py::arg("count"))
      .def("free", &free_slots, py::arg("slots").noconvert())
      .def("free_all", &Region::free_all, release_gil)
      .def(
          "seal",
          [](Region& self, const py::bytes& keys, const py::bytes& prefix, const Array<std::int64_t>& slots) {
            return seal_pages(keys, prefix, slots,
                              [&](const auto& before, const auto& pages, const auto& places) {
                                return self.seal(before, pages, places);
                              });
          },
          py::arg("keys"), py::arg("prefix"), py::arg("slots").noconvert())
      .def("match", &match, py::arg("keys"), py::arg("prefix"))
      .def("contains", &contains, py::arg("keys"))
      .def(
          "remove",
          [](Region& self, const py::bytes& keys) {
            const auto key_list = copy_keys(keys, "keys");
            return without_gil([&] { return self.remove(key_list); });
          },
          py::arg("keys"))
      .def("clear", &Region::clear, release_gil)
      .def("keys", [](const Region& self) { return bytes_of(without_gil([&] { return self.keys(); })); })
      .def("stats", [](const Region& self) { return dict_of(self.samples()); });
}

}  // namespace

void bind_host(py::module_& module) {
  bind_region(module);
  py::class_<tier::Promised>(module, "PromisedPages", py::is_final())
      .def_property_readonly("num_pages", &tier::Promised::num_pages)
      .def("release", &tier::Promised::release);
  py::class_<Stack, Holder<Stack>>(module, "TierStack", py::is_final())
      .def(py::init(&open_stack), py::kw_only(), py::arg("region"), py::arg("store"),
           py::arg("spill") = "through", py::arg("num_copy_threads") = 2, py::arg("pin_lifetime_s") = 30.0,
           py::arg("limit_promises") = py::none(), py::arg("deadline_base_s") = py::none(),
           py::arg("deadline_per_page_s") = py::none(), py::arg("recompute_per_page_s") = py::none(),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("match", &match_tiers, py::arg("keys"), py::arg("prefix"))
      .def("submit_get", &submit_get, py::arg("keys"), py::arg("prefix"), py::arg("addresses").noconvert(),
           py::arg("slots").noconvert() = py::none(), py::arg("timeout_s") = py::none())
      .def(
          "put",
          [](Stack& self, const py::bytes& keys, const py::bytes& prefix, const Array<std::int64_t>& slots) {
            return seal_pages(keys, prefix, slots,
                              [&](const auto& before, const auto& pages, const auto& places) {
                                return self.put(before, pages, places);
                              });
          },
          py::arg("keys"), py::arg("prefix"), py::arg("slots").noconvert())
      .def("promise", &promise, py::arg("keys"), py::arg("prefix"), py::arg("timeout_s") = py::none(),
           py::keep_alive<0, 1>())
      .def(
          "flush",
          [](Stack& self, const py::object& timeout_s) {
            const exec::Deadline deadline = deadline_of(timeout_s);
            return without_gil([&] { return self.flush(deadline); });
          },
          py::arg("timeout_s") = py::none())
      .def(
          "remove",
          [](Stack& self, const py::bytes& keys) {
            const auto key_list = copy_keys(keys, "keys");
            return tuple_of(without_gil([&] { return self.remove(key_list); }));
          },
          py::arg("keys"))
      .def("clear", [](Stack& self) { return tuple_of(without_gil([&] { return self.clear(); })); })
      .def("close", &Stack::close, py::call_guard<ReleasedGil>())
      .def("stats", [](const Stack& self) { return dict_of(self.samples()); });
}

}  // namespace tpusync::binding
