#include "tpusync/transport/options.h"

#include <fmt/format.h>

#include "tpusync/wire/frame.h"
#include "tpusync/wire/handshake.h"

namespace tpusync::transport {

namespace {

template <typename T>
base::Status check(const char* name, T value, T least, T most) {
  if (value >= least && value <= most) return {};
  return base::fail(base::Code::kInvalid,
                    fmt::format("{}: {}, allowed are {} to {}", name, value, least, most));
}

}  // namespace

base::Status validate(const Options& o) {
  TPUSYNC_TRY(check<int>("num_streams", o.num_streams, 1, wire::kStreamsMax));
  TPUSYNC_TRY(check<int>("num_io_threads", o.num_io_threads, 1, 64));
  TPUSYNC_TRY(check<std::size_t>("frame_bytes", o.frame_bytes, 4096, wire::kPayloadBytesMax));
  TPUSYNC_TRY(check<std::size_t>("inflight_bytes_max", o.inflight_bytes_max, o.frame_bytes, SIZE_MAX));
  TPUSYNC_TRY(check<std::size_t>("queued_bytes_max", o.queued_bytes_max, 1, SIZE_MAX));
  TPUSYNC_TRY(check<std::size_t>("queued_transfers_max", o.queued_transfers_max, 1, 1 << 24));
  TPUSYNC_TRY(check<std::size_t>("inbox_messages_max", o.inbox_messages_max, 1, 1 << 24));
  TPUSYNC_TRY(check<std::size_t>("inbox_bytes_max", o.inbox_bytes_max, 1, SIZE_MAX));
  TPUSYNC_TRY(check<std::size_t>("num_peers_max", o.num_peers_max, 1, 65536));
  TPUSYNC_TRY(check<std::size_t>("num_handshakes_max", o.num_handshakes_max, 1, 65536));
  TPUSYNC_TRY(check<std::size_t>("num_grants_max", o.num_grants_max, 1, 1 << 24));
  TPUSYNC_TRY(check<double>("heartbeat_s", o.heartbeat_s, 0.01, 3600));
  TPUSYNC_TRY(check<double>("silence_s", o.silence_s, 2 * o.heartbeat_s, 3600));
  TPUSYNC_TRY(check<double>("progress_s", o.progress_s, 0.01, 3600));
  return check<double>("handshake_s", o.handshake_s, 0.01, 3600);
}

}  // namespace tpusync::transport
