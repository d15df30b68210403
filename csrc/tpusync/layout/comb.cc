#include "tpusync/layout/comb.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

namespace tpusync::layout {

namespace {

// The solution of a * x = b modulo m, for gcd(a, m) = 1, in [0, m).
std::int64_t solve(std::int64_t a, std::int64_t b, std::int64_t m) {
  std::int64_t r0 = m, r1 = a % m, t0 = 0, t1 = 1;
  while (r1 != 0) {
    const std::int64_t q = r0 / r1;
    std::tie(r0, r1) = std::pair(r1, r0 - q * r1);
    std::tie(t0, t1) = std::pair(t1, t0 - q * t1);
  }
  const auto product = static_cast<__int128>(t0) * b % m;
  return static_cast<std::int64_t>((product + m) % m);
}

}  // namespace

// Products of indices and steps do not fit 64 bits.
Comb intersect(const Comb& a, const Comb& b) {
  using Wide = __int128;
  if (a.count == 0 || b.count == 0) return {};
  const std::int64_t gcd = std::gcd(a.step, b.step), difference = b.first - a.first;
  if (difference % gcd != 0) return {};
  // a.first + k * a.step is in b for k = k0 modulo b.step / gcd.
  const std::int64_t modulus = b.step / gcd;
  const std::int64_t wanted = (difference / gcd % modulus + modulus) % modulus;
  const std::int64_t k0 = modulus == 1 ? 0 : solve(a.step / gcd % modulus, wanted, modulus);
  const Wide step = Wide{a.step} * modulus;
  Wide first = a.first + Wide{k0} * a.step;
  const Wide begin = std::max(a.first, b.first);
  if (first < begin) first += (begin - first + step - 1) / step * step;
  const Wide last = std::min(a.first + (a.count - 1) * a.step, b.first + (b.count - 1) * b.step);
  if (first > last) return {};
  const auto count = static_cast<std::int64_t>((last - first) / step + 1);
  return {static_cast<std::int64_t>(first), count > 1 ? static_cast<std::int64_t>(step) : a.step, count};
}

Combs subtract(const Comb& a, const Comb& part) {
  Combs out;
  const std::int64_t ratio = part.count > 1 ? part.step / a.step : 1;
  const std::int64_t head = (part.first - a.first) / a.step;
  if (head > 0) out.push_back({a.first, a.step, head});
  for (std::int64_t i = 1; i < ratio; ++i)
    out.push_back({part.first + i * a.step, part.step, part.count - 1});
  const std::int64_t end = head + (part.count - 1) * ratio + 1;
  if (end < a.count) out.push_back({a.first + end * a.step, a.step, a.count - end});
  return out;
}

}  // namespace tpusync::layout
