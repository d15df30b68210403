#include <fmt/format.h>
#include <pybind11/stl.h>

#include <atomic>
#include <optional>
#include <thread>
#include <utility>

#include "tpusync/binding/bind.h"
#include "tpusync/layout/convert.h"
#include "tpusync/layout/reshard.h"
#include "tpusync/layout/runs.h"

namespace tpusync::binding {

using base::Code;
using layout::ReshardPlan;
using layout::TiledLayout;

namespace {

constexpr int kNumThreadsMax = 256;

// A loop on threads that live as long as one call.
class ThreadsFor final : public base::ParallelFor {
 public:
  explicit ThreadsFor(int num_threads) : num_threads_(static_cast<std::size_t>(num_threads)) {}
  std::size_t width() const override { return num_threads_; }
  void run(std::size_t count, const std::function<void(std::size_t)>& body) override {
    std::atomic<std::size_t> next = 0;  // relaxed: only hands out numbers; the joins order the rest
    const auto work = [&] {
      for (std::size_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
           i = next.fetch_add(1, std::memory_order_relaxed)) {
        body(i);
      }
    };
    std::vector<std::jthread> threads;
    for (std::size_t i = 1; i < std::min(num_threads_, count); ++i) threads.emplace_back(work);
    work();
  }

 private:
  const std::size_t num_threads_;
};

ThreadsFor threads_for(int num_threads) {
  if (num_threads < 1 || num_threads > kNumThreadsMax) {
    raise({Code::kInvalid, fmt::format("num_threads: {}, allowed are 1 to {}", num_threads, kNumThreadsMax)});
  }
  return ThreadsFor(num_threads);
}

std::span<const std::byte> bytes_of(const py::array& array, const char* name) {
  if (!(array.flags() & py::array::c_style))
    throw py::type_error(fmt::format("{} must be C-contiguous", name));
  return {static_cast<const std::byte*>(array.data()), static_cast<std::size_t>(array.nbytes())};
}

std::span<std::byte> writable_bytes_of(py::array& array, const char* name) {
  if (!array.writeable()) throw py::type_error(fmt::format("{} must be writable", name));
  const auto bytes = bytes_of(array, name);
  return {static_cast<std::byte*>(array.mutable_data()), bytes.size()};
}

// The implementation of that name, the best one for None.
const layout::ShuffleKernels& kernels_named(const std::optional<std::string>& name) {
  if (!name) return layout::best_shuffle_kernels();
  for (const auto* kernels : layout::shuffle_kernels()) {
    if (kernels->name == *name) return *kernels;
  }
  raise({Code::kUnsupported, fmt::format("kernels '{}' do not run here", *name)});
}

void check_index(const TiledLayout& self, const std::vector<std::int64_t>& index) {
  if (index.size() != self.rank()) {
    raise({Code::kInvalid, fmt::format("an index of {} numbers for rank {}", index.size(), self.rank())});
  }
  for (std::size_t dim = 0; dim < index.size(); ++dim) {
    if (index[dim] >= 0 && index[dim] < self.dims()[dim]) continue;
    raise({Code::kInvalid,
           fmt::format("index {} of dimension {} is not in [0, {})", index[dim], dim, self.dims()[dim])});
  }
}

Array<std::uint64_t> run_rows(const std::vector<layout::CopyRun>& runs) {
  Array<std::uint64_t> out({static_cast<py::ssize_t>(runs.size()), py::ssize_t{4}});
  std::uint64_t* at = out.mutable_data();
  for (const layout::CopyRun& run : runs) {
    *at++ = run.src_offset;
    *at++ = run.length;
    *at++ = run.count;
    *at++ = run.src_stride;
  }
  return out;
}

Array<std::uint64_t> runs(const TiledLayout& self, const std::vector<std::int64_t>& origin,
                          const std::vector<std::int64_t>& extent) {
  unwrap(layout::check_box(self, {origin, extent}));
  auto found = [&] {
    const ReleasedGil released;
    std::vector<layout::AxisRange> box;
    for (std::size_t dim = 0; dim < self.rank(); ++dim) {
      box.push_back(
          {self.axis(dim), static_cast<std::uint64_t>(origin[dim]), static_cast<std::uint64_t>(extent[dim])});
    }
    return layout::runs_of(box, self.element_bits());
  }();
  return run_rows(unwrap(std::move(found)));
}

void bind_tiled_layout(py::module_& module) {
  py::class_<TiledLayout>(module, "TiledLayout", py::is_final())
      .def_static(
          "parse",
          [](const std::string& text, const std::string& dtype, const std::vector<std::int64_t>& dims) {
            return unwrap(TiledLayout::parse(text, unwrap(layout::parse_dtype(dtype)), dims));
          },
          py::arg("text"), py::arg("dtype"), py::arg("dims"))
      .def_static(
          "linear",
          [](const std::string& dtype, const std::vector<std::int64_t>& dims) {
            return unwrap(TiledLayout::linear(unwrap(layout::parse_dtype(dtype)), dims));
          },
          py::arg("dtype"), py::arg("dims"))
      .def_property_readonly("text", &TiledLayout::text)
      .def_property_readonly("dtype", [](const TiledLayout& self) { return self.dtype().name; })
      .def_property_readonly("dtype_bits", [](const TiledLayout& self) { return self.dtype().bits; })
      .def_property_readonly("dims", [](const TiledLayout& self) { return py::tuple(py::cast(self.dims())); })
      .def_property_readonly(
          "minor_to_major",
          [](const TiledLayout& self) { return py::tuple(py::cast(self.spec().minor_to_major)); })
      .def_property_readonly("tiles",
                             [](const TiledLayout& self) {
                               py::list tiles;
                               for (const auto& tile : self.spec().tiles)
                                 tiles.append(py::tuple(py::cast(tile)));
                               return py::tuple(tiles);
                             })
      .def_property_readonly("memory_space", [](const TiledLayout& self) { return self.spec().memory_space; })
      .def_property_readonly("element_bits", &TiledLayout::element_bits)
      .def_property_readonly("padded_bytes", &TiledLayout::padded_bytes)
      .def_property_readonly("page_bytes", &TiledLayout::page_bytes)
      .def("offset_bits",
           [](const TiledLayout& self, const std::vector<std::int64_t>& index) {
             check_index(self, index);
             return self.offset_elements(index) * self.element_bits();
           })
      .def("runs", &runs, py::arg("origin"), py::arg("extent"))
      .def(
          "tile",
          [](const TiledLayout& self, py::array tiled, const py::array& codes, std::uint64_t fill,
             int num_threads, const std::optional<std::string>& kernels) {
            const auto out = writable_bytes_of(tiled, "out");
            const auto in = bytes_of(codes, "codes");
            const auto& with = kernels_named(kernels);
            ThreadsFor loop = threads_for(num_threads);
            const auto status = [&] {
              const ReleasedGil released;
              return layout::tile(self, out, in, fill, loop, with);
            }();
            unwrap(status);
          },
          py::arg("tiled"), py::arg("codes"), py::arg("fill"), py::arg("num_threads"),
          py::arg("kernels") = py::none())
      .def(
          "untile",
          [](const TiledLayout& self, py::array codes, const py::array& tiled, int num_threads,
             const std::optional<std::string>& kernels) {
            const auto out = writable_bytes_of(codes, "out");
            const auto in = bytes_of(tiled, "buffer");
            const auto& with = kernels_named(kernels);
            ThreadsFor loop = threads_for(num_threads);
            const auto status = [&] {
              const ReleasedGil released;
              return layout::untile(self, out, in, loop, with);
            }();
            unwrap(status);
          },
          py::arg("codes"), py::arg("tiled"), py::arg("num_threads"), py::arg("kernels") = py::none())
      .def("live_mask",
           [](const TiledLayout& self) {
             Array<std::uint8_t> mask(static_cast<py::ssize_t>(self.padded_bytes()));
             unwrap(layout::live_mask(self, writable_bytes_of(mask, "mask")));
             return mask;
           })
      .def("__eq__", [](const TiledLayout& self, const TiledLayout& other) { return self == other; });
}

layout::ShardSpec spec_of(const std::vector<std::int64_t>& dims, const std::string& dtype,
                          const py::list& shards) {
  layout::ShardSpec spec{dims, unwrap(layout::parse_dtype(dtype)), {}};
  for (const auto& item : shards) {
    const auto shard = item.cast<py::tuple>();
    spec.shards.push_back({shard[0].cast<layout::Dims>(), shard[1].cast<layout::Dims>(),
                           shard[2].cast<layout::Dims>(), shard[3].cast<const TiledLayout&>(),
                           shard[4].cast<std::vector<std::vector<std::size_t>>>()});
  }
  return spec;
}

void apply(const ReshardPlan& plan, const std::vector<py::array>& src, std::vector<py::array> dst,
           int num_threads, const std::optional<std::string>& kernels) {
  std::vector<std::span<const std::byte>> sources;
  std::vector<std::span<std::byte>> destinations;
  for (const auto& array : src) sources.push_back(bytes_of(array, "every source"));
  for (auto& array : dst) destinations.push_back(writable_bytes_of(array, "every destination"));
  const auto& with = kernels_named(kernels);
  ThreadsFor loop = threads_for(num_threads);
  const auto status = [&] {
    const ReleasedGil released;
    return plan.apply(destinations, sources, loop, with);
  }();
  unwrap(status);
}

void bind_plan(py::module_& module) {
  py::class_<ReshardPlan>(module, "Plan", py::is_final())
      .def_readonly("src_bytes", &ReshardPlan::src_bytes)
      .def_readonly("dst_bytes", &ReshardPlan::dst_bytes)
      .def_property_readonly("moved_bytes",
                             [](const ReshardPlan& self) { return (self.moved_bits() + 7) / 8; })
      .def_property_readonly("steps",
                             [](const ReshardPlan& self) {
                               py::list steps;
                               for (const auto& step : self.steps) {
                                 steps.append(py::make_tuple(step.src, step.dst, step.nests.size()));
                               }
                               return steps;
                             })
      .def("apply", &apply, py::arg("src"), py::arg("dst"), py::arg("num_threads"),
           py::arg("kernels") = py::none())
      .def("describe", &ReshardPlan::describe)
      .def("encode",
           [](const ReshardPlan& self) {
             const auto bytes = layout::encode_plan(self);
             return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
           })
      .def_static("decode",
                  [](const py::bytes& data) {
                    const auto text = static_cast<std::string_view>(data);
                    return unwrap(layout::decode_plan(std::as_bytes(std::span(text.data(), text.size()))));
                  })
      .def("__eq__", [](const ReshardPlan& self, const ReshardPlan& other) { return self == other; });
  module.def(
      "plan",
      [](const std::vector<std::int64_t>& src_dims, const std::string& src_dtype, const py::list& src,
         const std::vector<std::int64_t>& dst_dims, const std::string& dst_dtype, const py::list& dst) {
        auto from = spec_of(src_dims, src_dtype, src), to = spec_of(dst_dims, dst_dtype, dst);
        auto plan = [&] {
          const ReleasedGil released;
          return layout::plan_reshard(std::move(to), std::move(from));
        }();
        return unwrap(std::move(plan));
      },
      py::arg("src_dims"), py::arg("src_dtype"), py::arg("src"), py::arg("dst_dims"), py::arg("dst_dtype"),
      py::arg("dst"));
}

}  // namespace

void bind_layout(py::module_& module) {
  auto layout_module = module.def_submodule("layout", "Tiled layouts; see sglang_tpusync/layout.py.");
  py::list kernels, dtypes;
  for (const auto* each : layout::shuffle_kernels()) kernels.append(each->name);
  for (const auto& dtype : layout::all_dtypes()) dtypes.append(py::make_tuple(dtype.name, dtype.bits));
  layout_module.attr("KERNELS") = py::tuple(kernels);
  layout_module.attr("DTYPES") = py::tuple(dtypes);
  bind_tiled_layout(layout_module);
  bind_plan(layout_module);
}

}  // namespace tpusync::binding
