// The grammar of the text of a layout:
//
//   layout = "{" [number *("," number)] [":" [tiles] [bits] [space]] "}"
//   tiles  = "T" 1*("(" number *("," number) ")")    bits = "E(" number ")"    space = "S(" number ")"
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <limits>

#include "tpusync/layout/tiled_layout.h"

namespace tpusync::layout {

using base::Code;
using base::Result;
using base::Status;

namespace {

constexpr std::size_t kTextMax = 512;

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Result<LayoutSpec> parse() {
    if (text_.size() > kTextMax)
      return stop(Code::kInvalid, fmt::format("more than {} characters", kTextMax));
    LayoutSpec spec;
    TPUSYNC_TRY(expect('{'));
    if (peek() != ':' && peek() != '}') TPUSYNC_TRY(numbers(spec.minor_to_major, TiledLayout::kRankMax));
    if (peek() == ':') {
      ++at_;
      TPUSYNC_TRY(properties(spec));
    }
    TPUSYNC_TRY(expect('}'));
    if (at_ != text_.size()) return stop(Code::kInvalid, "nothing may follow");
    return spec;
  }

 private:
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  tl::unexpected<base::Error> stop(Code code, std::string_view what) const {
    return base::fail(code,
                      fmt::format("layout '{}', position {}: {}", text_.substr(0, kTextMax), at_, what));
  }

  Status expect(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return stop(Code::kInvalid, fmt::format("expected '{}'", c));
    ++at_;
    return {};
  }

  Status number(std::int64_t& out) {
    if (peek() == '*')
      return stop(Code::kUnsupported, "a '*' in a tile joins dimensions, which is not supported");
    if (peek() < '0' || peek() > '9') return stop(Code::kInvalid, "expected a number");
    const std::size_t begin = at_;
    out = 0;
    for (; peek() >= '0' && peek() <= '9'; ++at_) {
      if (out > (std::numeric_limits<std::int64_t>::max() - 9) / 10) {
        at_ = begin;
        return stop(Code::kInvalid, "a number of more than 63 bits");
      }
      out = out * 10 + (text_[at_] - '0');
    }
    return {};
  }

  Status numbers(std::vector<std::int64_t>& out, std::size_t limit) {
    while (true) {
      if (out.size() == limit) return stop(Code::kUnsupported, fmt::format("more than {} numbers", limit));
      TPUSYNC_TRY(number(out.emplace_back()));
      if (peek() != ',') return {};
      ++at_;
    }
  }

  Status in_parentheses(std::int64_t& out) {
    TPUSYNC_TRY(expect('('));
    TPUSYNC_TRY(number(out));
    return expect(')');
  }

  Status tiles(std::vector<std::vector<std::int64_t>>& out) {
    if (peek() != '(') return stop(Code::kInvalid, "expected '('");
    while (peek() == '(') {
      if (out.size() == TiledLayout::kTileLevelsMax) {
        return stop(Code::kUnsupported, fmt::format("more than {} tiles", TiledLayout::kTileLevelsMax));
      }
      ++at_;
      TPUSYNC_TRY(numbers(out.emplace_back(), TiledLayout::kRankMax));
      TPUSYNC_TRY(expect(')'));
    }
    return {};
  }

  // Each at most once and in this order, as XLA prints them.
  Status properties(LayoutSpec& spec) {
    if (peek() == '}') return stop(Code::kInvalid, "nothing follows the ':'");
    if (peek() == 'T') {
      ++at_;
      TPUSYNC_TRY(tiles(spec.tiles));
    }
    if (peek() == 'E') {
      const std::size_t number_at = ++at_ + 1;
      TPUSYNC_TRY(in_parentheses(spec.element_bits));
      if (spec.element_bits == 0) {
        at_ = number_at;
        return stop(Code::kInvalid, "elements of 0 bits");
      }
    }
    if (peek() == 'S') {
      ++at_;
      if (peek() == 'C') return stop(Code::kUnsupported, "split configurations are not supported");
      TPUSYNC_TRY(in_parentheses(spec.memory_space));
    }
    switch (peek()) {
      case 'D':
        return stop(Code::kUnsupported, "dimension level types are not supported");
      case 'L':
        return stop(Code::kUnsupported, "tail padding is not supported");
      case '#':
      case '*':
        return stop(Code::kUnsupported, "index and pointer types are not supported");
      case 'P':
      case 'M':
        return stop(Code::kUnsupported, "physical shapes and metadata prefixes are not supported");
      default:
        return {};
    }
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

Result<LayoutSpec> parse_layout_spec(std::string_view text) {
  return Parser(text).parse();
}

std::string to_text(const LayoutSpec& spec) {
  std::string out = fmt::format("{{{}", fmt::join(spec.minor_to_major, ","));
  if (!spec.tiles.empty() || spec.element_bits != 0 || spec.memory_space != 0) out += ':';
  if (!spec.tiles.empty()) out += 'T';
  for (const auto& tile : spec.tiles) out += fmt::format("({})", fmt::join(tile, ","));
  if (spec.element_bits != 0) out += fmt::format("E({})", spec.element_bits);
  if (spec.memory_space != 0) out += fmt::format("S({})", spec.memory_space);
  return out + '}';
}

}  // namespace tpusync::layout
