// What the processes of a node may still write today: a token bucket of bytes, kept in the directory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace tpusync::flash {

// A value: the file `ledger`, 64 bytes (docs/formats/flash-v1.md).
struct Ledger {
  std::uint64_t left_bytes = 0;  // in the bucket
  std::int64_t updated_unix_ns = 0;
  std::uint64_t leased_bytes = 0;  // handed out since the ledger began
  bool operator==(const Ledger&) const = default;

  // A full bucket.
  static Ledger begin(std::uint64_t budget_bytes_per_day, std::int64_t now_unix_ns);

  // Adds what has accrued since the last update; a day's budget is the most that the bucket holds. False, and
  // a full bucket, when the ledger cannot be right: it is from the future, more than a clock's correction.
  bool refill(std::uint64_t budget_bytes_per_day, std::int64_t now_unix_ns);
  // Takes up to `bytes` out; answers how many.
  std::uint64_t take(std::uint64_t bytes);
  void give_back(std::uint64_t bytes, std::uint64_t budget_bytes_per_day);
};

inline constexpr std::size_t kLedgerBytes = 64;
std::array<std::byte, kLedgerBytes> encode_ledger(const Ledger& ledger);
std::optional<Ledger> decode_ledger(std::span<const std::byte, kLedgerBytes> bytes);

}  // namespace tpusync::flash
