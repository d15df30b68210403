#include <fmt/format.h>
#include <pybind11/stl.h>

#include <filesystem>
#include <optional>

#include "tpusync/binding/arguments.h"
#include "tpusync/flash/flash_store.h"

namespace tpusync::binding {

using base::Code;
using flash::FlashStore;
using index::PageKey;

namespace {

template <typename Value>
Value choice_of(const char* name, const std::string& text,
                std::initializer_list<std::pair<const char*, Value>> choices) {
  std::string allowed;
  for (const auto& [choice, value] : choices) {
    if (text == choice) return value;
    allowed += (allowed.empty() ? "" : ", ") + std::string(choice);
  }
  raise({Code::kInvalid, fmt::format("{}: '{}', allowed are {}", name, text, allowed)});
}

using StoreHolder = Holder<FlashStore>;

StoreHolder open_store(const flash::FlashOptions& options) {
  auto store = [&] {
    const ReleasedGil released;
    return FlashStore::open(options);
  }();
  if (store) return StoreHolder(store->release());
  base::Error error = std::move(store).error();
  // A directory of a newer version is the fault of the storage, not of the configuration.
  if (error.code == Code::kUnsupported || error.code == Code::kNotFound) error.code = Code::kIo;
  raise(error);
}

struct BatchArguments {
  std::vector<PageKey> keys;
  std::vector<PageKey> prefix;
  flash::PageBatch batch;
};

void fill_batch(BatchArguments& arguments, const py::bytes& keys, const py::bytes& prefix,
                const Array<std::uint64_t>& addresses, const Array<std::uint64_t>& lengths,
                const py::object& timeout_s) {
  arguments.keys = copy_keys(keys, "keys");
  arguments.prefix = copy_keys(prefix, "prefix");
  if (addresses.ndim() != 2 || lengths.ndim() != 1) {
    raise({Code::kInvalid, "addresses must have the shape [pages, pieces] and lengths [pieces]"});
  }
  if (static_cast<std::size_t>(addresses.shape(0)) != arguments.keys.size() ||
      addresses.shape(1) != lengths.shape(0)) {
    raise({Code::kInvalid, fmt::format("addresses: [{}, {}] for {} keys and {} lengths", addresses.shape(0),
                                       addresses.shape(1), arguments.keys.size(), lengths.shape(0))});
  }
  arguments.batch = {.keys = arguments.keys,
                     .prefix = arguments.prefix,
                     .addresses = view(addresses),
                     .lengths = view(lengths),
                     .deadline = deadline_of(timeout_s)};
}

using Submit = base::Result<flash::BatchTicket> (FlashStore::*)(const flash::PageBatch&);

template <Submit kSubmit>
PyTicket submit(FlashStore& store, const py::bytes& keys, const py::bytes& prefix,
                const Array<std::uint64_t>& addresses, const Array<std::uint64_t>& lengths,
                const py::object& timeout_s) {
  BatchArguments arguments;
  fill_batch(arguments, keys, prefix, addresses, lengths, timeout_s);
  auto submitted = [&] {
    const ReleasedGil released;
    return (store.*kSubmit)(arguments.batch);
  }();
  flash::BatchTicket ticket = unwrap(std::move(submitted));
  return {std::move(ticket.ticket), std::move(ticket.outcomes)};
}

std::size_t match(FlashStore& store, const py::bytes& keys, const py::bytes& prefix) {
  const auto key_list = copy_keys(keys, "keys");
  const auto prefix_list = copy_keys(prefix, "prefix");
  const ReleasedGil released;
  return store.match(key_list, prefix_list);
}

Array<bool> contains(FlashStore& store, const py::bytes& keys) {
  const auto key_list = copy_keys(keys, "keys");
  const auto found = [&] {
    const ReleasedGil released;
    return store.contains(key_list);
  }();
  Array<bool> answer(static_cast<py::ssize_t>(found.size()));
  for (std::size_t i = 0; i < found.size(); ++i) answer.mutable_data()[i] = found[i];
  return answer;
}

std::size_t remove(FlashStore& store, const py::bytes& keys) {
  const auto key_list = copy_keys(keys, "keys");
  const ReleasedGil released;
  return store.remove(key_list);
}

py::bytes all_keys(FlashStore& store) {
  const auto keys = [&] {
    const ReleasedGil released;
    return store.keys();
  }();
  return bytes_of(keys);
}

py::dict stats(FlashStore& store) {
  const auto samples = [&] {
    const ReleasedGil released;
    return store.stats();
  }();
  return dict_of(samples);
}

// Finite, not negative and far from any overflow.
std::chrono::duration<double> seconds_of(const char* key, double seconds) {
  constexpr double kSecondsMax = 3.2e9;  // a century
  if (!(seconds >= 0 && seconds <= kSecondsMax)) {
    raise({Code::kInvalid, fmt::format("{}: {}, allowed are 0 to {}", key, seconds, kSecondsMax)});
  }
  return std::chrono::duration<double>(seconds);
}

StoreHolder make_store(const std::string& path, const py::bytes& name_space,
                       const std::string& namespace_json, std::uint64_t page_bytes,
                       std::optional<std::uint64_t> capacity_bytes, std::optional<std::uint64_t> floor_bytes,
                       std::optional<std::uint64_t> write_budget_bytes_per_day, const std::string& fsync,
                       const std::string& io, int num_threads, bool allow_tmpfs, std::optional<double> ttl_s,
                       double latency_budget_s,
                       const std::vector<std::pair<std::uint64_t, std::uint64_t>>& memory) {
  using flash::FsyncPolicy;
  using flash::IoKind;
  flash::FlashOptions options;
  options.path = path.empty() ? path : std::filesystem::absolute(path).lexically_normal().string();
  options.name_space = digest_of(name_space);
  options.namespace_json = namespace_json;
  options.page_bytes = page_bytes;
  options.capacity_bytes = capacity_bytes;
  options.floor_bytes = floor_bytes;
  options.write_budget_bytes_per_day = write_budget_bytes_per_day;
  options.fsync = choice_of<FsyncPolicy>(
      "fsync", fsync,
      {{"none", FsyncPolicy::kNone}, {"interval", FsyncPolicy::kInterval}, {"always", FsyncPolicy::kAlways}});
  options.io = choice_of<IoKind>("io", io,
                                 {{"auto", IoKind::kAuto},
                                  {"uring", IoKind::kUring},
                                  {"threads", IoKind::kThreads},
                                  {"buffered", IoKind::kBuffered}});
  options.num_threads = num_threads;
  options.allow_tmpfs = allow_tmpfs;
  if (ttl_s) options.ttl = std::chrono::duration_cast<std::chrono::seconds>(seconds_of("ttl_s", *ttl_s));
  options.latency_budget =
      std::chrono::duration_cast<std::chrono::milliseconds>(seconds_of("latency_budget_s", latency_budget_s));
  for (const auto& [address, num_bytes] : memory) {
    if (address == 0 || num_bytes > std::numeric_limits<std::uint64_t>::max() - address) {
      raise({Code::kInvalid, fmt::format("memory: {} bytes at {:#x} are no memory", num_bytes, address)});
    }
    options.memory.emplace_back(reinterpret_cast<std::byte*>(address), num_bytes);
  }
  return open_store(options);
}

bool flush(FlashStore& store, const py::object& timeout_s) {
  const exec::Deadline deadline = deadline_of(timeout_s);
  const ReleasedGil released;
  return store.flush(deadline);
}

}  // namespace

void bind_flash(py::module_& module) {
  module.attr("KEY_BYTES") = index::kKeyBytes;
  const auto release_gil = py::call_guard<ReleasedGil>();
  py::class_<FlashStore, StoreHolder>(module, "FlashStore", py::is_final())
      .def(py::init(&make_store), py::kw_only(), py::arg("path"), py::arg("namespace"),
           py::arg("namespace_json"), py::arg("page_bytes"), py::arg("capacity_bytes") = py::none(),
           py::arg("floor_bytes") = py::none(), py::arg("write_budget_bytes_per_day") = py::none(),
           py::arg("fsync") = "none", py::arg("io") = "auto", py::arg("num_threads") = 0,
           py::arg("allow_tmpfs") = false, py::arg("ttl_s") = py::none(), py::arg("latency_budget_s") = 2.0,
           py::arg("memory") = std::vector<std::pair<std::uint64_t, std::uint64_t>>())
      .def("submit_put", &submit<&FlashStore::submit_put>, py::arg("keys"), py::arg("prefix"),
           py::arg("addresses").noconvert(), py::arg("lengths").noconvert(),
           py::arg("timeout_s") = py::none())
      .def("submit_get", &submit<&FlashStore::submit_get>, py::arg("keys"), py::arg("prefix"),
           py::arg("addresses").noconvert(), py::arg("lengths").noconvert(),
           py::arg("timeout_s") = py::none())
      .def("match", &match, py::arg("keys"), py::arg("prefix"))
      .def("contains", &contains, py::arg("keys"))
      .def("remove", &remove, py::arg("keys"))
      .def("clear", &FlashStore::clear, release_gil)
      .def("keys", &all_keys)
      .def("stats", &stats)
      .def("flush", &flush, py::arg("timeout_s") = py::none())
      .def("close", &FlashStore::close, release_gil);
}

}  // namespace tpusync::binding
