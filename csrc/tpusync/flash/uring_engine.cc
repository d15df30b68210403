#include "tpusync/flash/io_engine.h"

namespace tpusync::flash {

base::Result<std::unique_ptr<IoEngine>> make_uring_engine(os::File&) {
  return base::fail(base::Code::kUnsupported, "this build has no io_uring");
}

}  // namespace tpusync::flash
