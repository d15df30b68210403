#include <fmt/format.h>

#include <utility>

#include "tpusync/binding/bind.h"
#include "tpusync/device/host_device.h"

namespace tpusync::binding {

using base::Code;
using device::Buffer;
using device::CopyStream;
using device::HostDevice;
using layout::PageGeometry;

namespace {

constexpr double kPauseMaxS = 3600;

// Closing waits for copies, which must not hold up the rest of Python.
template <typename T>
struct DeleteWithoutGil {
  void operator()(T* resource) const {
    const ReleasedGil released;
    delete resource;
  }
};
template <typename T>
using Holder = std::unique_ptr<T, DeleteWithoutGil<T>>;

std::vector<Buffer> buffers_of(const Array<std::uint64_t>& bases, const Array<std::uint64_t>& sizes,
                               const char* side) {
  if (bases.ndim() != 1 || sizes.ndim() != 1 || bases.size() != sizes.size()) {
    throw py::type_error(
        fmt::format("{}_bases and {}_sizes must be one-dimensional and of one length", side, side));
  }
  std::vector<Buffer> buffers;
  buffers.reserve(static_cast<std::size_t>(bases.size()));
  for (py::ssize_t i = 0; i < bases.size(); ++i) {
    buffers.push_back({reinterpret_cast<std::byte*>(bases.data()[i]), sizes.data()[i]});
  }
  return buffers;
}

std::span<const std::int64_t> slots_of(const Array<std::int64_t>& slots, const char* side) {
  if (slots.ndim() != 1) throw py::type_error(fmt::format("{}_slots must be one-dimensional", side));
  return view(slots);
}

PyTicket submit_copy(CopyStream& stream, const Array<std::uint64_t>& dst_bases,
                     const Array<std::uint64_t>& dst_sizes, const Array<std::uint64_t>& src_bases,
                     const Array<std::uint64_t>& src_sizes, const PageGeometry& dst, const PageGeometry& src,
                     const Array<std::int64_t>& dst_slots, const Array<std::int64_t>& src_slots,
                     std::pair<std::int64_t, std::int64_t> layers) {
  const std::vector<Buffer> dst_buffers = buffers_of(dst_bases, dst_sizes, "dst");
  const std::vector<Buffer> src_buffers = buffers_of(src_bases, src_sizes, "src");
  const device::PageCopy copy{.dst_buffers = dst_buffers,
                              .src_buffers = src_buffers,
                              .dst = dst,
                              .src = src,
                              .dst_slots = slots_of(dst_slots, "dst"),
                              .src_slots = slots_of(src_slots, "src"),
                              .layers = {layers.first, layers.second}};
  const ReleasedGil released;
  return PyTicket{stream.submit_copy(copy), nullptr};
}

void pause(CopyStream& stream, double timeout_s) {
  if (!(timeout_s >= 0 && timeout_s <= kPauseMaxS)) {
    raise({Code::kInvalid, fmt::format("timeout_s: {}, allowed are 0 to {:g}", timeout_s, kPauseMaxS)});
  }
  stream.pause(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(timeout_s)));
}

PageGeometry host_geometry(const std::string& layout, std::int64_t num_layers, std::int64_t num_slots,
                           std::int64_t num_heads, std::int64_t head_bytes, std::int64_t page_size) {
  return unwrap(PageGeometry::host({.layout = unwrap(layout::parse_host_layout(layout)),
                                    .num_layers = num_layers,
                                    .num_slots = num_slots,
                                    .num_heads = num_heads,
                                    .head_bytes = head_bytes,
                                    .page_size = page_size}));
}

void bind_geometry(py::module_& module) {
  py::class_<PageGeometry>(module, "PageGeometry", py::is_final())
      .def_static(
          "device",
          [](std::int64_t num_layers, std::int64_t num_slots, std::int64_t row_bytes,
             std::int64_t row_stride_bytes, std::int64_t page_size) {
            return unwrap(
                PageGeometry::device({num_layers, num_slots, row_bytes, row_stride_bytes, page_size}));
          },
          py::kw_only(), py::arg("num_layers"), py::arg("num_slots"), py::arg("row_bytes"),
          py::arg("row_stride_bytes"), py::arg("page_size"))
      .def_static("host", &host_geometry, py::kw_only(), py::arg("layout"), py::arg("num_layers"),
                  py::arg("num_slots"), py::arg("num_heads"), py::arg("head_bytes"), py::arg("page_size"))
      .def_property_readonly("row_bytes", &PageGeometry::row_bytes)
      .def_property_readonly("page_bytes", &PageGeometry::page_bytes);
}

}  // namespace

void bind_device(py::module_& module) {
  bind_geometry(module);
  py::class_<CopyStream, Holder<CopyStream>>(module, "CopyStream", py::is_final())
      .def("submit_copy", &submit_copy, py::arg("dst_bases").noconvert(), py::arg("dst_sizes").noconvert(),
           py::arg("src_bases").noconvert(), py::arg("src_sizes").noconvert(), py::arg("dst"), py::arg("src"),
           py::arg("dst_slots").noconvert(), py::arg("src_slots").noconvert(), py::arg("layers"))
      .def("submit_marker",
           [](CopyStream& stream) {
             const ReleasedGil released;
             return PyTicket{stream.submit_marker(), nullptr};
           })
      .def("pause", &pause, py::arg("timeout_s"));
  py::class_<HostDevice, Holder<HostDevice>>(module, "HostDevice", py::is_final())
      .def(py::init([](int num_threads) {
             return Holder<HostDevice>(unwrap(HostDevice::open(num_threads)).release());
           }),
           py::kw_only(), py::arg("num_threads"))
      .def(
          "open_stream",
          [](HostDevice& self, std::string name) {
            return Holder<CopyStream>(unwrap(self.open_stream(std::move(name))).release());
          },
          py::arg("name"), py::keep_alive<0, 1>());
}

}  // namespace tpusync::binding
