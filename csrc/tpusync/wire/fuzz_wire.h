// One input for every decoder of this room: what the fuzzer and its seeded smoke both call. Whatever decodes
// must encode back to the same bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <span>

#include "tpusync/wire/frame.h"
#include "tpusync/wire/handshake.h"

namespace tpusync::wire {

template <typename Value, typename Encode>
void check_same(std::span<const std::byte> in, const base::Result<Value>& decoded, Encode encode) {
  if (!decoded) return;
  Bytes out;
  Writer writer(out);
  encode(*decoded, writer);
  if (!std::equal(in.begin(), in.end(), out.begin(), out.end())) std::abort();
}

inline void fuzz_wire(std::span<const std::byte> in) {
  const auto table = [](const auto& value, Writer& out) { encode_table(value, out); };
  check_same(in, decode_head(in), encode_head);
  check_same(in, decode_data(in), table);
  check_same(in, decode_offer(in), table);
  check_same(in, decode_share(in), table);
  check_same(in, decode_ack(in), [](std::uint64_t value, Writer& out) { encode_ack(value, out); });
  check_same(in, decode_hello(in), encode_hello);
  check_same(in, decode_challenge(in), encode_challenge);
  // A reason is cleaned when it is decoded, so only what is decoded again must be equal.
  if (const auto first = decode_refuse(in)) {
    Bytes out;
    Writer writer(out);
    encode_table(*first, writer);
    if (*decode_refuse(out) != *first) std::abort();
  }
}

}  // namespace tpusync::wire
