// A store directory for tools: views as dicts of plain values, which sglang_tpusync/store/ gives their types.
#include <fmt/format.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "tpusync/base/clock.h"
#include "tpusync/binding/arguments.h"
#include "tpusync/flash/limits.h"
#include "tpusync/flash/region_check.h"
#include "tpusync/flash/region_summary.h"
#include "tpusync/flash/store_repair.h"
#include "tpusync/flash/store_view.h"
#include "tpusync/host/region_view.h"

namespace tpusync::binding {

using base::Code;
using flash::Finding;
using flash::RegionCheck;

namespace {

// Calls without the GIL. A region that is busy or gone is a fault of the storage for somebody who names it.
template <typename Call>
auto run(const Call& call) {
  auto result = [&] {
    const ReleasedGil released;
    return call();
  }();
  if (!result) {
    base::Error error = std::move(result).error();
    if (error.code == Code::kNotFound || error.code == Code::kBusy) error.code = Code::kIo;
    raise(error);
  }
  return result;
}

template <typename Bytes>
py::bytes to_bytes(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Names of files need not be UTF-8.
py::str text_of(const std::string& text) {
  PyObject* const decoded =
      PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "replace");
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(decoded);
}
py::list texts_of(const std::vector<std::string>& texts) {
  py::list out;
  for (const std::string& text : texts) out.append(text_of(text));
  return out;
}

// 32 bytes or None.
std::optional<flash::Digest> digest_or_none(const py::object& name_space) {
  if (name_space.is_none()) return std::nullopt;
  const std::string_view view = py::cast<std::string_view>(name_space);
  flash::Digest digest;
  if (view.size() != digest.size()) raise({Code::kInvalid, "namespace: must be 32 bytes"});
  std::memcpy(digest.data(), view.data(), digest.size());
  return digest;
}

py::dict dict_of(const flash::RegionInfo& region) {
  static constexpr const char* kWriterStates[] = {"none", "live", "unknown"};
  py::dict out;
  out["name"] = region.name;
  out["has_table"] = region.has_table;
  out["has_slots"] = region.has_slots;
  out["writer"] = kWriterStates[static_cast<int>(region.writer_state)];
  out["process_id"] = region.writer ? py::cast(region.writer->process_id) : py::none();
  out["opened_unix_ns"] = region.writer ? py::cast(region.writer->since_unix_ns) : py::none();
  out["format_version"] = region.header ? py::cast(region.header->version) : py::none();
  out["namespace"] = region.header ? py::object(to_bytes(region.header->name_space)) : py::none();
  out["page_bytes"] = region.header ? py::cast(region.header->page_bytes) : py::none();
  out["slot_bytes"] = region.header ? py::cast(region.header->slot_bytes) : py::none();
  out["created_unix_ns"] = region.header ? py::cast(region.header->created_unix_ns) : py::none();
  out["modified_unix_ns"] = region.modified_unix_ns;
  out["table_bytes"] = region.table_bytes;
  out["slots_bytes"] = region.slots_bytes;
  out["disk_bytes"] = region.disk_bytes;
  out["trouble"] = text_of(region.trouble);
  return out;
}

py::dict dict_of(const flash::NamespaceInfo& info) {
  py::list regions;
  for (const auto& region : info.regions) regions.append(dict_of(region));
  py::dict out;
  out["name"] = info.name;
  out["json"] = py::bytes(info.json);
  out["regions"] = regions;
  out["temporaries"] = texts_of(info.temporaries);
  out["strangers"] = texts_of(info.strangers);
  return out;
}

py::dict view_directory(const std::string& path) {
  const auto info = run([&] { return flash::view_store(os::posix_file_system(), {path}); });
  py::list namespaces;
  for (const auto& name_space : info->namespaces) namespaces.append(dict_of(name_space));
  py::dict out;
  out["has_store"] = info->has_store;
  out["other_versions"] = info->other_versions;
  out["namespaces"] = namespaces;
  out["strangers"] = texts_of(info->strangers);
  out["used_bytes"] = info->used_bytes;
  out["total_bytes"] = info->space.total_bytes;
  out["available_bytes"] = info->space.available_bytes;
  out["wants_space"] = info->wants_space;
  out["ledger_damaged"] = info->ledger_damaged;
  out["ledger"] = py::none();
  if (info->ledger) {
    out["ledger"] =
        py::make_tuple(info->ledger->left_bytes, info->ledger->updated_unix_ns, info->ledger->leased_bytes);
  }
  return out;
}

py::dict limits(const std::string& path, std::optional<std::uint64_t> capacity_bytes,
                std::optional<std::uint64_t> floor_bytes,
                std::optional<std::uint64_t> write_budget_bytes_per_day) {
  flash::FlashOptions options;
  options.path = path;
  options.capacity_bytes = capacity_bytes;
  options.floor_bytes = floor_bytes;
  options.write_budget_bytes_per_day = write_budget_bytes_per_day;
  const auto info = run([&] { return flash::view_store(os::posix_file_system(), {path}); });
  const auto chosen = run([&] { return flash::choose_limits(options, info->space, info->used_bytes); });
  py::dict out;
  out["capacity_bytes"] = chosen->capacity_bytes;
  out["floor_bytes"] = chosen->floor_bytes;
  out["write_budget_bytes_per_day"] = chosen->budget_bytes_per_day;
  out["budget_left_bytes"] = py::none();
  if (info->ledger) {
    flash::Ledger ledger = *info->ledger;
    ledger.refill(chosen->budget_bytes_per_day, base::Clock().unix_ns());
    out["budget_left_bytes"] = std::min(ledger.left_bytes, chosen->budget_bytes_per_day);
  }
  return out;
}

py::dict summarize(const std::string& base_path, const py::object& name_space, std::size_t num_trees_max) {
  const auto digest = digest_or_none(name_space);
  const auto summary = run([&]() -> base::Result<flash::RegionSummary> {
    auto reader =
        flash::RegionReader::open(os::posix_file_system(), {.base_path = base_path, .name_space = digest});
    if (!reader) return tl::unexpected(std::move(reader).error());
    return flash::summarize(**reader, num_trees_max);
  });
  py::list largest;
  for (const auto& tree : summary->largest) {
    py::dict each;
    each["root"] = to_bytes(tree.root.bytes);
    each["root_depth"] = tree.root_depth;
    each["num_pages"] = tree.num_pages;
    each["num_pages_longest"] = tree.num_pages_longest;
    largest.append(each);
  }
  py::dict out;
  out["num_slots"] = summary->num_slots;
  out["num_entries"] = summary->num_entries;
  out["num_damaged"] = summary->num_damaged;
  out["num_trees"] = summary->num_trees;
  const bool has_entries = summary->num_entries > 0;
  out["oldest_unix_ns"] = has_entries ? py::cast(summary->oldest_unix_ns) : py::none();
  out["newest_unix_ns"] = has_entries ? py::cast(summary->newest_unix_ns) : py::none();
  out["largest"] = largest;
  return out;
}

std::unique_ptr<RegionCheck> open_check(const std::string& base_path, const py::object& name_space) {
  const auto digest = digest_or_none(name_space);
  return std::move(*run([&] {
    return RegionCheck::open(os::posix_file_system(), {.base_path = base_path, .name_space = digest});
  }));
}

py::dict progress_of(const RegionCheck& check) {
  const auto& progress = check.progress();
  py::dict out;
  out["num_slots"] = progress.num_slots;
  out["num_looked_at"] = progress.num_looked_at;
  out["num_intact"] = progress.num_intact;
  out["num_moved"] = progress.num_moved;
  out["num_bytes"] = progress.num_bytes;
  return out;
}

py::list findings_of(const RegionCheck& check) {
  static constexpr const char* kKinds[] = {"record", "payload", "unreadable", "header", "short_table"};
  py::list out;
  for (const Finding& finding : check.findings()) {
    py::dict each;
    each["kind"] = kKinds[static_cast<int>(finding.kind)];
    each["slot"] = finding.slot;
    each["text"] = text_of(finding.text);
    out.append(each);
  }
  return out;
}

std::size_t repair(const RegionCheck& check, const std::string& path, const std::string& base_path) {
  const flash::Repair repair{
      .base_path = base_path, .findings = check.findings(), .header = check.reader().header()};
  return *run(
      [&] { return flash::repair_region(os::posix_file_system(), {path}, repair, base::Clock().unix_ns()); });
}

py::dict dict_of(const host::RegionView& region) {
  py::dict out;
  out["path"] = text_of(region.entry.path);
  out["namespace"] = to_bytes(region.entry.name_space);
  out["has_writer"] = region.has_writer;
  out["process_id"] = region.writer ? py::cast(region.writer->process_id) : py::none();
  out["opened_unix_ns"] = region.writer ? py::cast(region.writer->since_unix_ns) : py::none();
  out["modified_unix_ns"] = region.entry.modified_unix_ns;
  out["memory_bytes"] = region.entry.memory_bytes;
  out["page_bytes"] = region.page_bytes;
  out["num_slots"] = region.num_slots;
  out["num_pages"] = region.num_pages;
  out["num_damaged"] = region.num_damaged;
  out["trouble"] = text_of(region.trouble);
  return out;
}

py::list view_dram(const std::string& root) {
  const auto views = run([&]() -> base::Result<std::vector<host::RegionView>> {
    const auto registry = host::Registry::open(root);
    if (!registry) return tl::unexpected(registry.error());
    return host::view_regions(*registry);
  });
  py::list out;
  for (const host::RegionView& view : *views) out.append(dict_of(view));
  return out;
}

host::Registry::Entry dram_entry(const std::string& path, const py::bytes& name_space) {
  host::Registry::Entry entry;
  entry.path = path;
  entry.name_space = digest_of(name_space);
  return entry;
}

std::unique_ptr<host::RegionCheck> open_dram_check(const std::string& path, const py::bytes& name_space) {
  const host::Registry::Entry entry = dram_entry(path, name_space);
  return std::move(*run([&] { return host::RegionCheck::open(entry); }));
}

py::dict progress_of(const host::RegionCheck& check) {
  const auto& progress = check.progress();
  py::dict out;
  out["num_slots"] = progress.num_slots;
  out["num_looked_at"] = progress.num_looked_at;
  out["num_intact"] = progress.num_intact;
  out["num_moved"] = progress.num_moved;
  out["num_bytes"] = progress.num_bytes;
  return out;
}

py::list findings_of(const host::RegionCheck& check) {
  py::list out;
  for (const host::RegionCheck::Finding& finding : check.findings()) {
    const std::uint32_t slot = index::to_number(finding.slot);
    py::dict each;
    each["kind"] = finding.is_record ? "record" : "payload";
    each["slot"] = slot;
    const char* const what = finding.is_record ? "its seal is damaged" : "its page is not what was sealed";
    each["text"] = fmt::format("slot {}: {}", slot, what);
    out.append(each);
  }
  return out;
}

void bind_dram(py::module_& store) {
  store.def("view_dram", &view_dram, py::arg("root"));
  store.def(
      "dram_keys",
      [](const std::string& path, const py::bytes& name_space) {
        const host::Registry::Entry entry = dram_entry(path, name_space);
        return bytes_of(*run([&] { return host::keys_in(entry); }));
      },
      py::arg("path"), py::arg("namespace"));
  store.def(
      "remove_dram",
      [](const std::string& root, const std::string& path) {
        return *run([&]() -> base::Result<bool> {
          const auto registry = host::Registry::open(root);
          if (!registry) return tl::unexpected(registry.error());
          return registry->remove_if_dead(path);
        });
      },
      py::arg("root"), py::arg("path"));
  py::class_<host::RegionCheck>(store, "DramCheck", py::is_final())
      .def(py::init(&open_dram_check), py::arg("path"), py::arg("namespace"))
      .def(
          "step",
          [](host::RegionCheck& self, std::uint64_t num_bytes) {
            py::gil_scoped_release release;
            return self.step(num_bytes);
          },
          py::arg("num_bytes"))
      .def_property_readonly("progress", [](const host::RegionCheck& self) { return progress_of(self); })
      .def_property_readonly("findings", [](const host::RegionCheck& self) { return findings_of(self); });
}

}  // namespace

void bind_store(py::module_& module) {
  auto store = module.def_submodule("store", "Store directories for tools; see sglang_tpusync/store/.");
  store.attr("FORMAT_VERSION") = flash::kFormatVersion;
  store.def("view", &view_directory, py::arg("path"));
  store.def("limits", &limits, py::kw_only(), py::arg("path"), py::arg("capacity_bytes"),
            py::arg("floor_bytes"), py::arg("write_budget_bytes_per_day"));
  store.def("summarize", &summarize, py::arg("base_path"), py::arg("namespace"), py::arg("num_trees_max"));
  store.def(
      "remove_region",
      [](const std::string& path, const std::string& base_path) {
        run([&] { return flash::remove_region(os::posix_file_system(), {path}, base_path); });
      },
      py::arg("path"), py::arg("base_path"));
  store.def(
      "remove_orphans",
      [](const std::string& path, bool dry_run) {
        return texts_of(
            *run([&] { return flash::remove_orphans(os::posix_file_system(), {path}, dry_run); }));
      },
      py::arg("path"), py::kw_only(), py::arg("dry_run"));
  py::class_<RegionCheck>(store, "RegionCheck", py::is_final())
      .def(py::init(&open_check), py::arg("base_path"), py::arg("namespace"))
      .def(
          "step",
          [](RegionCheck& self, std::uint64_t num_bytes) {
            return *run([&] { return self.step(num_bytes); });
          },
          py::arg("num_bytes"))
      .def_property_readonly("progress", [](const RegionCheck& self) { return progress_of(self); })
      .def_property_readonly("findings", [](const RegionCheck& self) { return findings_of(self); })
      .def("repair", &repair, py::arg("path"), py::arg("base_path"));
  bind_dram(store);
}

}  // namespace tpusync::binding
