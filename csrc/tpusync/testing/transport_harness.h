// What the tests of the transport share: two endpoints, memory on both sides, and what is expected of a
// ticket.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tpusync/base/prng.h"
#include "tpusync/transport/endpoint.h"

namespace tpusync::testing {

inline exec::Deadline in_seconds(double s) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(s));
}

inline std::vector<std::byte> random_bytes(std::size_t length, std::uint64_t seed) {
  std::vector<std::byte> out(length);
  base::Prng(seed).fill(out);
  return out;
}

inline std::unique_ptr<transport::Endpoint> open_endpoint(const transport::Options& options) {
  auto endpoint = transport::Endpoint::open(options);
  EXPECT_TRUE(endpoint) << (endpoint ? "" : endpoint.error().message);
  return *std::move(endpoint);
}

inline std::uint64_t stat(const transport::Endpoint& endpoint, std::string_view name) {
  for (const metrics::Sample& sample : endpoint.samples()) {
    if (sample.name == name) return std::get<std::uint64_t>(sample.value);
  }
  ADD_FAILURE() << "no counter " << name;
  return 0;
}

// Waits until the counter is as expected; false after ten seconds.
inline bool wait_stat(const transport::Endpoint& endpoint, std::string_view name, std::uint64_t expected) {
  for (const auto until = *in_seconds(10); stat(endpoint, name) != expected;) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// A writer and a reader; the memory of each is one region.
struct TransportPair {
  TransportPair(const transport::Options& writer_options, const transport::Options& reader_options,
                std::size_t length)
      : source(random_bytes(length, 1)),
        target(length),
        reader(open_endpoint(reader_options)),
        writer(open_endpoint(writer_options)),
        source_region(*writer->register_region(source.data(), length)),
        target_region(*reader->register_region(target.data(), length)) {}

  void connect() { connect(reader->addresses()); }
  void connect(const std::vector<std::string>& addresses) {
    const auto connected = writer->connect(addresses, in_seconds(30));
    ASSERT_TRUE(connected) << connected.error().message;
    peer = *connected;
  }

  transport::GrantId grant_all() {
    return *reader->open_grant({{target_region, 0, target.size()}}, std::nullopt);
  }

  transport::Piece piece(std::size_t from, std::size_t to, std::size_t length) const {
    return {source.data() + from, target_region, to, length};
  }

  exec::Ticket write(transport::GrantId grant, std::vector<transport::Piece> pieces,
                     exec::Deadline deadline = {}) {
    const auto ticket = writer->submit_write(peer, grant, std::move(pieces), deadline);
    EXPECT_TRUE(ticket) << ticket.error().message;
    return ticket ? *ticket : exec::Ticket();
  }
  exec::Ticket write_all() { return write(grant_all(), {piece(0, 0, source.size())}); }

  // Declared first: the memory outlives the endpoints.
  std::vector<std::byte> source;
  std::vector<std::byte> target;
  std::unique_ptr<transport::Endpoint> reader;
  std::unique_ptr<transport::Endpoint> writer;
  transport::RegionId source_region;
  transport::RegionId target_region;
  transport::PeerId peer = 0;
};

inline void expect_ok(const exec::Ticket& ticket) {
  ASSERT_TRUE(ticket.wait(in_seconds(60)));
  const base::Status status = ticket.status();
  EXPECT_TRUE(status) << status.error().message;
}

inline void expect_error(const exec::Ticket& ticket, base::Code code) {
  ASSERT_TRUE(ticket.wait(in_seconds(60)));
  const base::Status status = ticket.status();
  ASSERT_FALSE(status);
  EXPECT_EQ(base::code_name(status.error().code), base::code_name(code)) << status.error().message;
}

}  // namespace tpusync::testing
