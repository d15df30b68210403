#include "tpusync/layout/convert.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "tpusync/layout/apply_nest.h"

namespace tpusync::layout {
namespace {

using base::Code;
using Bytes = std::vector<std::byte>;

TiledLayout parse(std::string_view text, std::string_view dtype, const Dims& dims) {
  return TiledLayout::parse(text, parse_dtype(dtype).value(), dims).value();
}

// SHA-256 of FIPS 180-4, for golden digests only.
std::string sha256(std::span<const std::byte> data) {
  static constexpr std::array<std::uint32_t, 64> kRound = [] {
    // Fractional parts of the cube roots of the first 64 primes.
    std::array<std::uint32_t, 64> out{};
    int found = 0;
    for (int n = 2; found < 64; ++n) {
      bool prime = true;
      for (int d = 2; d * d <= n; ++d) prime = prime && n % d != 0;
      if (!prime) continue;
      // floor(cbrt(n) * 2^32) by bisection on integers.
      unsigned __int128 low = 0, high = (unsigned __int128){8} << 32;
      while (high - low > 1) {
        const unsigned __int128 middle = (low + high) / 2;
        const bool below = middle * middle * middle < ((unsigned __int128)n << 96);
        (below ? low : high) = middle;
      }
      out[found++] = static_cast<std::uint32_t>(low);
    }
    return out;
  }();
  std::array<std::uint32_t, 8> h{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  Bytes padded(data.begin(), data.end());
  padded.push_back(std::byte{0x80});
  while (padded.size() % 64 != 56) padded.push_back(std::byte{0});
  for (int i = 7; i >= 0; --i) padded.push_back(std::byte(data.size() * 8 >> (8 * i)));
  for (std::size_t at = 0; at < padded.size(); at += 64) {
    std::array<std::uint32_t, 64> w{};
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 4; ++j) w[i] = w[i] << 8 | std::to_integer<std::uint32_t>(padded[at + i * 4 + j]);
    }
    for (int i = 16; i < 64; ++i) {
      const std::uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + w[i - 7] +
             (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
    }
    auto s = h;
    for (int i = 0; i < 64; ++i) {
      const std::uint32_t t1 = s[7] + (std::rotr(s[4], 6) ^ std::rotr(s[4], 11) ^ std::rotr(s[4], 25)) +
                               ((s[4] & s[5]) ^ (~s[4] & s[6])) + kRound[i] + w[i];
      const std::uint32_t t2 = (std::rotr(s[0], 2) ^ std::rotr(s[0], 13) ^ std::rotr(s[0], 22)) +
                               ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      s = {t1 + t2, s[0], s[1], s[2], s[3] + t1, s[4], s[5], s[6]};
    }
    for (int i = 0; i < 8; ++i) h[i] += s[i];
  }
  std::string out;
  for (const std::uint32_t word : h) {
    for (int i = 28; i >= 0; i -= 4) out += "0123456789abcdef"[word >> i & 15];
  }
  return out;
}

// The closed formula of the elements of golden images.
Bytes pattern(const DType& dtype, std::uint64_t num_elements) {
  const std::uint64_t bytes = dtype.storage_bits() / 8;
  Bytes out(num_elements * bytes);
  for (std::uint64_t i = 0; i < num_elements; ++i) {
    const std::uint64_t mixed = (i * 2654435761u + 12345) & 0xFFFFFFFF;
    std::uint64_t code = mixed >> 13;
    if (dtype.bits == 32) code = mixed;
    if (dtype.bits == 16) code = i * 40503 + 77;
    code &= (std::uint64_t{1} << dtype.bits) - 1;
    std::memcpy(out.data() + i * bytes, &code, bytes);
  }
  return out;
}

TEST(Convert, Sha256IsThatOfTheStandard) {
  EXPECT_EQ(sha256(std::as_bytes(std::span("abc", 3))),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Convert, AgreesWithEveryGoldenImage) {
  std::ifstream in(std::filesystem::path(__FILE__).parent_path() / "../../../tests/golden/images.txt");
  ASSERT_TRUE(in.is_open());
  int num_images = 0;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with('#')) continue;
    std::istringstream fields(line);
    std::string dtype, text, dims, digest;
    fields >> dtype >> text >> dims >> digest;
    Dims shape;
    std::istringstream numbers(dims);
    for (std::string dim; std::getline(numbers, dim, ',');) shape.push_back(std::stoll(dim));
    const TiledLayout layout = parse(text, dtype, shape);
    const Bytes codes = pattern(layout.dtype(), layout.num_elements());
    base::SerialFor loop;
    for (const ShuffleKernels* kernels : shuffle_kernels()) {
      Bytes tiled(layout.padded_bytes(), std::byte{0xA5}), back(codes.size());
      ASSERT_TRUE(tile(layout, tiled, codes, 0, loop, *kernels));
      ASSERT_EQ(sha256(tiled), digest) << line << " " << kernels->name;
      ASSERT_TRUE(untile(layout, back, tiled, loop, *kernels));
      ASSERT_EQ(back, codes) << line << " " << kernels->name;
    }
    ++num_images;
  }
  EXPECT_GT(num_images, 150);
}

class ThreadsFor final : public base::ParallelFor {
 public:
  std::size_t width() const override { return 4; }
  void run(std::size_t count, const std::function<void(std::size_t)>& body) override {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
  }
};

TEST(Convert, PiecesOnThreadsAreTheWhole) {
  for (const char* text :
       {"{3,2,1,0:T(8,128)(2,1)}", "{0,3,2,1:T(8,128)(2,1)}", "{3,1,2,0:T(8,128)(2,1)}", "{3,2,1,0}"}) {
    const TiledLayout layout = parse(text, "BF16", {65, 32, 8, 128});
    const Bytes codes = pattern(layout.dtype(), layout.num_elements());
    Bytes one(layout.padded_bytes()), many(layout.padded_bytes(), std::byte{1});
    base::SerialFor serial;
    ThreadsFor threads;
    ASSERT_TRUE(tile(layout, one, codes, 0, serial));
    ASSERT_TRUE(tile(layout, many, codes, 0, threads));
    EXPECT_EQ(one, many) << text;
  }
}

TEST(Convert, TheUsualLayoutsGetTheirKernels) {
  const auto kernel = [](std::string_view dtype, const Dims& dims, std::string_view from,
                         std::string_view to) {
    const TiledLayout src = parse(from, dtype, dims), dst = parse(to, dtype, dims);
    const auto nests = plan_box(dst, Dims(dims.size()), src, {Dims(dims.size()), dims}).value();
    EXPECT_EQ(nests.size(), 1u);
    return kernel_name(kernel_of(nests[0]));
  };
  EXPECT_EQ(kernel("BF16", {16, 64, 8, 128}, "{3,2,1,0:T(8,128)(2,1)}", "{3,2,1,0}"), "split");
  EXPECT_EQ(kernel("BF16", {16, 64, 8, 128}, "{3,2,1,0}", "{3,2,1,0:T(8,128)(2,1)}"), "join");
  EXPECT_EQ(kernel("F8E4M3FN", {16, 64, 4, 4, 128}, "{4,3,2,1,0:T(4,128)(4,1)}", "{4,3,2,1,0}"), "split");
  EXPECT_EQ(kernel("BF16", {16, 64, 8, 256}, "{3,2,1,0:T(8,128)(2,1)}", "{3,2,1,0:T(2,128)(2,1)}"), "runs");
  EXPECT_EQ(kernel("BF16", {16, 64, 8, 128}, "{3,2,1,0:T(8,128)(2,1)}", "{3,1,2,0:T(8,128)(2,1)}"), "repack");
  EXPECT_EQ(kernel("BF16", {256, 64, 8, 64}, "{0,3,2,1:T(8,128)(2,1)}", "{3,2,1,0}"), "transpose");
  EXPECT_EQ(kernel("F32", {16, 8, 128}, "{2,1,0:T(8,128)}", "{2,1,0}"), "runs");
}

TEST(Convert, RefusesBuffersOfAnotherSizeAndThoseThatOverlap) {
  const TiledLayout layout = parse("{1,0:T(8,128)(2,1)}", "BF16", {8, 128});
  base::SerialFor loop;
  Bytes a(2048), b(2048), c(4000);
  EXPECT_NE(
      tile(layout, std::span(a).first(2047), b, 0, loop).error().message.find("2047 bytes, must be 2048"),
      std::string::npos);
  EXPECT_EQ(untile(layout, std::span(a).first(100), b, loop).error().code, Code::kInvalid);
  EXPECT_NE(tile(layout, std::span(c).first(2048), std::span(c).last(2048), 0, loop)
                .error()
                .message.find("overlap"),
            std::string::npos);
  EXPECT_NE(tile(layout, a, b, 1 << 16, loop).error().message.find("fill 65536"), std::string::npos);
}

TEST(Convert, BoxesOutsideTheArrayAreRefused) {
  const TiledLayout layout = parse("{1,0}", "F32", {4, 6});
  EXPECT_TRUE(check_box(layout, {{1, 2}, {3, 4}}));
  EXPECT_NE(check_box(layout, {{1, 2}, {4, 4}}).error().message.find("[1, 1 + 4) of dimension 0 of size 4"),
            std::string::npos);
  EXPECT_FALSE(check_box(layout, {{INT64_MAX, 0}, {INT64_MAX, 1}}));
  EXPECT_FALSE(check_box(layout, {{-1, 0}, {1, 1}}));
  EXPECT_FALSE(check_box(layout, {{0}, {1}}));
}

}  // namespace
}  // namespace tpusync::layout
