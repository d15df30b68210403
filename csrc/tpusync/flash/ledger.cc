#include "tpusync/flash/ledger.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "tpusync/base/bytes.h"
#include "tpusync/base/checksum.h"

namespace tpusync::flash {

using base::load_le;
using base::store_le;

namespace {
constexpr std::string_view kMagic = "TPUSYNCL";
constexpr std::size_t kChecksumOffset = kLedgerBytes - 8;
constexpr std::int64_t kNsPerDay = 86'400'000'000'000;
constexpr std::int64_t kClockCorrectionMaxNs = kNsPerDay;
}  // namespace

Ledger Ledger::begin(std::uint64_t budget_bytes_per_day, std::int64_t now_unix_ns) {
  return {.left_bytes = budget_bytes_per_day, .updated_unix_ns = now_unix_ns, .leased_bytes = 0};
}

bool Ledger::refill(std::uint64_t budget_bytes_per_day, std::int64_t now_unix_ns) {
  if (updated_unix_ns - now_unix_ns > kClockCorrectionMaxNs) {
    *this = begin(budget_bytes_per_day, now_unix_ns);
    return false;
  }
  const std::int64_t passed_ns = std::clamp<std::int64_t>(now_unix_ns - updated_unix_ns, 0, kNsPerDay);
  const double accrued =
      static_cast<double>(budget_bytes_per_day) * static_cast<double>(passed_ns) / kNsPerDay;
  // Fractions of a byte stay with the old time stamp rather than being lost.
  if (accrued < 1.0 && passed_ns > 0) return true;
  left_bytes = std::min(budget_bytes_per_day, left_bytes + static_cast<std::uint64_t>(accrued));
  updated_unix_ns = now_unix_ns;
  return true;
}

std::uint64_t Ledger::take(std::uint64_t bytes) {
  const std::uint64_t taken = std::min(bytes, left_bytes);
  left_bytes -= taken;
  leased_bytes += taken;
  return taken;
}

void Ledger::give_back(std::uint64_t bytes, std::uint64_t budget_bytes_per_day) {
  left_bytes = std::min(budget_bytes_per_day, left_bytes + bytes);
  leased_bytes -= std::min(leased_bytes, bytes);
}

std::array<std::byte, kLedgerBytes> encode_ledger(const Ledger& ledger) {
  std::array<std::byte, kLedgerBytes> bytes{};
  std::memcpy(bytes.data(), kMagic.data(), kMagic.size());
  store_le(bytes.data() + 8, ledger.left_bytes);
  store_le(bytes.data() + 16, ledger.updated_unix_ns);
  store_le(bytes.data() + 24, ledger.leased_bytes);
  store_le(bytes.data() + kChecksumOffset, base::checksum64(std::span(bytes).first<kChecksumOffset>()));
  return bytes;
}

std::optional<Ledger> decode_ledger(std::span<const std::byte, kLedgerBytes> bytes) {
  if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) return std::nullopt;
  const auto sum = load_le<std::uint64_t>(bytes.data() + kChecksumOffset);
  if (sum != base::checksum64(bytes.first<kChecksumOffset>())) return std::nullopt;
  return Ledger{.left_bytes = load_le<std::uint64_t>(bytes.data() + 8),
                .updated_unix_ns = load_le<std::int64_t>(bytes.data() + 16),
                .leased_bytes = load_le<std::uint64_t>(bytes.data() + 24)};
}

}  // namespace tpusync::flash
