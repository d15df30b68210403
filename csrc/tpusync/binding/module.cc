#include "tpusync/binding/bind.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The native core of sglang_tpusync; see _core.pyi.";
  tpusync::binding::bind_ticket(module);
  tpusync::binding::bind_device(module);
  tpusync::binding::bind_evict(module);
  tpusync::binding::bind_flash(module);
  tpusync::binding::bind_host(module);
  tpusync::binding::bind_layout(module);
  tpusync::binding::bind_log(module);
  tpusync::binding::bind_store(module);
  tpusync::binding::bind_transport(module);
}
