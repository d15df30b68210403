#include "tpusync/device/copy_stream.h"

#include <gtest/gtest.h>

#include <latch>
#include <numeric>

#include "tpusync/device/host_device.h"

namespace tpusync::device {
namespace {

using base::Code;
using namespace std::chrono_literals;

// A device pool and a host pool of one part with `num_slots` rows in 2 layers, and what one copies to the
// other.
struct Pools {
  explicit Pools(std::int64_t num_slots, std::int64_t row_bytes = 64)
      : device(layout::PageGeometry::device({2, num_slots, row_bytes, row_bytes, 1}).value()),
        host(layout::PageGeometry::host({layout::HostLayout::kPageFirst, 2, num_slots, 1, row_bytes, 1})
                 .value()),
        layers(2, std::vector<std::byte>(num_slots * row_bytes)),
        pool(2 * num_slots * row_bytes),
        slots(num_slots) {
    std::iota(slots.begin(), slots.end(), 0);
    for (auto& layer : layers) {
      for (std::size_t i = 0; i < layer.size(); ++i)
        layer[i] = std::byte(i * 31 + i / 251 + (&layer == &layers[1]));
    }
    device_buffers = {{layers[0].data(), layers[0].size()}, {layers[1].data(), layers[1].size()}};
    host_buffers = {{pool.data(), pool.size()}};
  }

  PageCopy to_host() { return {host_buffers, device_buffers, host, device, slots, slots, {0, 2}}; }
  PageCopy to_device() { return {device_buffers, host_buffers, device, host, slots, slots, {0, 2}}; }

  bool host_holds_device() const {
    const std::size_t row = device.row_bytes();
    for (std::size_t slot = 0; slot < slots.size(); ++slot) {
      for (std::size_t layer = 0; layer < 2; ++layer) {
        const auto* at = pool.data() + (slot * 2 + layer) * row;
        if (!std::equal(at, at + row, layers[layer].data() + slot * row)) return false;
      }
    }
    return true;
  }

  layout::PageGeometry device, host;
  std::vector<std::vector<std::byte>> layers;
  std::vector<std::byte> pool;
  std::vector<std::int64_t> slots;
  std::vector<Buffer> device_buffers, host_buffers;
};

class CopyStreamTest : public testing::Test {
 protected:
  std::unique_ptr<HostDevice> device_ = HostDevice::open(3).value();
  std::unique_ptr<CopyStream> stream_ = device_->open_stream("test").value();
};

TEST_F(CopyStreamTest, CopiesThereAndBack) {
  for (const std::int64_t num_slots : {1, 100, 50000}) {
    Pools pools(num_slots);
    const auto ticket = stream_->submit_copy(pools.to_host());
    EXPECT_TRUE(ticket.wait());
    EXPECT_TRUE(ticket.status());
    EXPECT_TRUE(pools.host_holds_device());
    const auto layers = pools.layers;
    for (auto& layer : pools.layers) std::fill(layer.begin(), layer.end(), std::byte{0});
    EXPECT_TRUE(stream_->submit_copy(pools.to_device()).wait());
    EXPECT_EQ(pools.layers, layers);
  }
}

TEST_F(CopyStreamTest, AJobStartsAfterTheOneBeforeIt) {
  Pools pools(50000), second(50000);
  second.device_buffers = pools.device_buffers;
  // To the host, and from there over the emptied device: only in this order do the bytes come back.
  for (int round = 0; round < 20; ++round) {
    const auto before = pools.layers;
    std::fill(pools.pool.begin(), pools.pool.end(), std::byte(round));
    const auto out = stream_->submit_copy(pools.to_host());
    const auto back = stream_->submit_copy(pools.to_device());
    const auto marker = stream_->submit_marker();
    EXPECT_TRUE(marker.wait());
    EXPECT_TRUE(out.done());
    EXPECT_TRUE(back.done());
    ASSERT_EQ(pools.layers, before);
  }
}

TEST_F(CopyStreamTest, NothingStartsWhileItPauses) {
  Pools pools(10);
  stream_->pause(1h);
  const auto ticket = stream_->submit_copy(pools.to_host());
  const auto marker = stream_->submit_marker();
  EXPECT_FALSE(marker.wait(std::chrono::steady_clock::now() + 20ms));
  EXPECT_FALSE(ticket.done());
  EXPECT_FALSE(pools.host_holds_device());
  stream_->pause(0s);
  EXPECT_TRUE(marker.wait());
  EXPECT_TRUE(pools.host_holds_device());
}

TEST_F(CopyStreamTest, APauseEndsByItself) {
  stream_->pause(10ms);
  EXPECT_TRUE(stream_->submit_marker().wait());
  stream_->pause(1h);
  stream_->pause(10ms);
  EXPECT_TRUE(stream_->submit_marker().wait());
}

TEST_F(CopyStreamTest, APausedStreamDoesNotHoldUpAnother) {
  auto other = device_->open_stream("other").value();
  stream_->pause(1h);
  const auto waiting = stream_->submit_marker();
  EXPECT_TRUE(other->submit_marker().wait());
  EXPECT_FALSE(waiting.done());
}

TEST_F(CopyStreamTest, CancelledBeforeItStartsItMovesNothing) {
  Pools pools(10);
  stream_->pause(1h);
  const auto ticket = stream_->submit_copy(pools.to_host());
  ticket.cancel();
  const auto marker = stream_->submit_marker();
  stream_->pause(0s);
  EXPECT_TRUE(marker.wait());
  EXPECT_TRUE(marker.status());
  EXPECT_EQ(ticket.status().error().code, Code::kCancelled);
  EXPECT_EQ(pools.pool, std::vector<std::byte>(pools.pool.size()));
}

TEST_F(CopyStreamTest, ClosingCancelsWhatWaits) {
  Pools pools(10);
  stream_->pause(1h);
  const auto ticket = stream_->submit_copy(pools.to_host());
  stream_.reset();
  EXPECT_TRUE(ticket.done());
  EXPECT_EQ(ticket.status().error().code, Code::kCancelled);
}

TEST_F(CopyStreamTest, ClosingWaitsForWhatRuns) {
  for (int round = 0; round < 20; ++round) {
    Pools pools(20000);
    auto stream = device_->open_stream("short").value();
    const auto ticket = stream->submit_copy(pools.to_host());
    stream.reset();
    ASSERT_TRUE(ticket.done());
    ASSERT_TRUE(!ticket.status() || pools.host_holds_device());
    // The pools go away here: a byte that still moved would be seen by the sanitizers.
  }
}

TEST_F(CopyStreamTest, ManyMarkersNeedNoStack) {
  stream_->pause(1h);
  exec::Ticket last;
  Pools pools(1);
  for (int i = 0; i < 20000; ++i)
    last = i % 2 ? stream_->submit_marker() : stream_->submit_copy(pools.to_host());
  stream_->pause(0s);
  EXPECT_TRUE(last.wait());
}

TEST_F(CopyStreamTest, RefusesBeforeAByteMoves) {
  Pools pools(10);
  const auto refusal = [&](const PageCopy& copy) {
    const auto ticket = stream_->submit_copy(copy);
    EXPECT_TRUE(ticket.done());
    EXPECT_FALSE(ticket.status());
    if (ticket.status()) return std::string();
    EXPECT_EQ(ticket.status().error().code, Code::kInvalid);
    return ticket.status().error().message;
  };
  const std::vector<std::int64_t> beyond(10, 10);
  PageCopy copy = pools.to_host();
  copy.src_slots = beyond;
  EXPECT_NE(refusal(copy).find("source slot 10"), std::string::npos);

  copy = pools.to_host();
  pools.host_buffers[0].size_bytes -= 1;
  EXPECT_NE(refusal(copy).find("destination buffer 0 of 1279 bytes"), std::string::npos);
  pools.host_buffers[0].size_bytes += 1;

  pools.device_buffers[1].base = nullptr;
  EXPECT_NE(refusal(copy).find("is no memory"), std::string::npos);
  pools.device_buffers[1] = {reinterpret_cast<std::byte*>(UINTPTR_MAX - 10), 640};
  EXPECT_NE(refusal(copy).find("is no memory"), std::string::npos);
  pools.device_buffers[1] = {pools.pool.data() + 1200, 640};
  EXPECT_NE(refusal(copy).find("a source and a destination overlap"), std::string::npos);
  pools.device_buffers[1] = {pools.layers[0].data() + 600, 640};
  EXPECT_NE(refusal(pools.to_device()).find("destination buffers overlap"), std::string::npos);
  EXPECT_EQ(pools.pool, std::vector<std::byte>(pools.pool.size()));
}

TEST_F(CopyStreamTest, LayersMayShareAnAllocationWhoseRowsAreApart) {
  // (slot, layer, row): what SGLang's unified pool hands out as one strided view per layer.
  const auto strided = layout::PageGeometry::device({2, 10, 64, 128, 1}).value();
  Pools pools(10);
  std::vector<std::byte> shared(10 * 128);
  const std::vector<Buffer> views{{shared.data(), 10 * 128 - 64}, {shared.data() + 64, 10 * 128 - 64}};
  const PageCopy copy{views, pools.device_buffers, strided, pools.device, pools.slots, pools.slots, {0, 2}};
  const auto ticket = stream_->submit_copy(copy);
  EXPECT_TRUE(ticket.wait());
  ASSERT_TRUE(ticket.status()) << ticket.status().error().message;
  pools.pool = shared;
  EXPECT_TRUE(pools.host_holds_device());
}

TEST_F(CopyStreamTest, TilesGoToRowsAndBack) {
  const layout::Dims dims{40, 64, 8, 128};
  const auto dtype = layout::parse_dtype("BF16").value();
  const auto tiles = layout::TiledLayout::parse("{3,2,1,0:T(8,128)(2,1)}", dtype, dims).value();
  const auto keys = layout::TiledPool::make(tiles, {{0, 1}, {2}, {3}}).value();
  Pools pools(40 * 64, 8 * 128 * 2);
  pools.device = layout::PageGeometry::tiled(keys, 2, 64).value();
  const auto before = pools.layers;
  const auto ticket = stream_->submit_copy(pools.to_host());
  EXPECT_TRUE(ticket.wait());
  ASSERT_TRUE(ticket.status()) << ticket.status().error().message;
  // The words of a tile hold two heads, lane by lane: head 1, element 5 of slot 70 in layer 1.
  const std::uint64_t in_tiles = tiles.offset_elements(layout::Dims{1, 6, 1, 5}) * 2;
  const std::uint64_t in_rows = (70 * 2 + 1) * 8 * 128 * 2 + (1 * 128 + 5) * 2;
  EXPECT_EQ(pools.pool[in_rows], pools.layers[1][in_tiles]);
  for (auto& layer : pools.layers) std::fill(layer.begin(), layer.end(), std::byte{0});
  EXPECT_TRUE(stream_->submit_copy(pools.to_device()).wait());
  EXPECT_EQ(pools.layers, before);
  EXPECT_FALSE(pools.host_holds_device());

  pools.device_buffers[1].size_bytes -= 1;
  EXPECT_NE(stream_->submit_copy(pools.to_host()).status().error().message.find("source buffer 1"),
            std::string::npos);
}

TEST(HostDevice, RefusesTooManyThreadsAndStreams) {
  EXPECT_EQ(HostDevice::open(0).error().code, Code::kInvalid);
  auto device = HostDevice::open(1).value();
  std::vector<std::unique_ptr<CopyStream>> streams;
  for (int i = 0; i < HostDevice::kNumStreamsMax; ++i) streams.push_back(device->open_stream("s").value());
  EXPECT_EQ(device->open_stream("s").error().code, Code::kExhausted);
  streams.pop_back();
  EXPECT_TRUE(device->open_stream("s"));
}

}  // namespace
}  // namespace tpusync::device
