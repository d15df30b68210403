#include "tpusync/layout/tiled_layout.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

namespace tpusync::layout {
namespace {

using base::Code;

TiledLayout parse(std::string_view text, std::string_view dtype, const Dims& dims) {
  return TiledLayout::parse(text, parse_dtype(dtype).value(), dims).value();
}

TEST(TiledLayout, PlacesTheExamplesOfXlasDocument) {
  // F32[3,5] in (2,2) tiles: element (2,3) is 17; with the whole shape in (2,2) again from the document's
  // example.
  const TiledLayout simple = parse("{1,0:T(2,2)}", "F32", {3, 5});
  EXPECT_EQ(simple.offset_elements(Dims{2, 3}), 17u);
  EXPECT_EQ(simple.padded_elements(), 24u);
  const TiledLayout packed = parse("{1,0:T(2,4)(2,1)}", "BF16", {4, 8});
  EXPECT_EQ(packed.offset_elements(Dims{1, 0}), 1u);
  EXPECT_EQ(packed.offset_elements(Dims{0, 1}), 2u);
}

TEST(TiledLayout, EveryElementHasAPlaceOfItsOwnInsideTheBuffer) {
  const std::pair<const char*, Dims> kCases[] = {{"{3,2,1,0:T(8,128)(2,1)}", {2, 3, 5, 130}},
                                                 {"{0,3,2,1:T(8,128)(2,1)}", {9, 2, 3, 7}},
                                                 {"{0:T(256)(128)(2,1)}", {700}},
                                                 {"{2,0,1:T(3,5)(2,2)}", {4, 5, 6}},
                                                 {"{1,0:T(7)(2,3,2)}", {9, 11}},
                                                 {"{:T(256)}", {}}};
  for (const auto& [text, dims] : kCases) {
    const TiledLayout layout = parse(text, "BF16", dims);
    std::set<std::uint64_t> places;
    Dims index(dims.size(), 0);
    for (bool more = true; more;) {
      EXPECT_TRUE(places.insert(layout.offset_elements(index)).second) << text;
      more = false;
      for (std::size_t dim = dims.size(); dim > 0 && !more; --dim) {
        more = ++index[dim - 1] < dims[dim - 1];
        if (!more) index[dim - 1] = 0;
      }
    }
    EXPECT_EQ(places.size(), layout.num_elements());
    EXPECT_LT(*places.rbegin(), layout.padded_elements());
  }
}

TEST(TiledLayout, AnEmptyArrayHasNoBytes) {
  EXPECT_EQ(parse("{1,0:T(8,128)}", "F32", {0, 128}).padded_bytes(), 0u);
  EXPECT_EQ(parse("{1,0}", "F32", {5, 0}).num_elements(), 0u);
  EXPECT_FALSE(TiledLayout::linear(parse_dtype("F32").value(), Dims{0, INT64_MAX, INT64_MAX}).has_value());
}

TEST(TiledLayout, APageNeedsADimensionThatNoTileReaches) {
  EXPECT_EQ(parse("{3,2,1,0:T(8,128)(2,1)}", "BF16", {4096, 64, 8, 128}).page_bytes(), 131072u);
  EXPECT_EQ(parse("{0,3,2,1:T(8,128)(2,1)}", "BF16", {4096, 64, 8, 64}).page_bytes(), std::nullopt);
  EXPECT_EQ(parse("{1,0:T(8,128)}", "F32", {16, 128}).page_bytes(), std::nullopt);
  EXPECT_EQ(parse("{1,0}", "F32", {16, 100}).page_bytes(), 400u);
  // The second tile reaches over the first one: the pages are interleaved.
  EXPECT_EQ(parse("{1,0:T(4)(2,1,4)}", "F32", {16, 100}).page_bytes(), std::nullopt);
}

TEST(TiledLayout, RefusesWithTextAndPosition) {
  const auto error = parse_layout_spec("{1,0:T(8,x)}").error();
  EXPECT_EQ(error.code, Code::kInvalid);
  EXPECT_NE(error.message.find("'{1,0:T(8,x)}', position 9"), std::string::npos) << error.message;
  EXPECT_EQ(parse_layout_spec("{1,0:T(*,128)}").error().code, Code::kUnsupported);
  EXPECT_EQ(parse_layout_spec(std::string(1000, '{')).error().code, Code::kInvalid);
}

std::ifstream open_golden(const char* name) {
  // From csrc/tpusync/layout to the data that the Python tests read too.
  return std::ifstream(std::filesystem::path(__FILE__).parent_path() / "../../../tests/golden" / name);
}

Dims parse_dims(const std::string& text) {
  Dims dims;
  std::istringstream in(text == "-" ? "" : text);
  for (std::string dim; std::getline(in, dim, ',');) dims.push_back(std::stoll(dim));
  return dims;
}

TEST(TiledLayout, AgreesWithEveryGoldenLayout) {
  std::ifstream in = open_golden("layouts.txt");
  ASSERT_TRUE(in.is_open());
  std::string line, dtype, text;
  int num_rows = 0;
  while (std::getline(in, line)) {
    if (line.starts_with('#')) continue;
    std::istringstream fields(line);
    if (line.find('{') != std::string::npos) {
      fields >> dtype >> text;
      continue;
    }
    std::string dims, padded, page;
    fields >> dims >> padded >> page;
    const TiledLayout layout = parse(text, dtype, parse_dims(dims));
    ASSERT_EQ(layout.text(), text);
    ASSERT_EQ(std::to_string(layout.padded_bytes()), padded) << line;
    ASSERT_EQ(layout.page_bytes() ? std::to_string(*layout.page_bytes()) : "-", page) << line;
    ++num_rows;
  }
  EXPECT_GT(num_rows, 4000);
}

}  // namespace
}  // namespace tpusync::layout
