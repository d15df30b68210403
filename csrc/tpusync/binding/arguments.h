// What crosses the boundary as arguments and answers: keys, digests, slots, samples.
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "tpusync/binding/bind.h"
#include "tpusync/index/page_key.h"
#include "tpusync/metrics/metrics.h"

namespace tpusync::binding {

// A copy: the bytes object may go as soon as the GIL is released. Throws ConfigError for a broken length.
inline std::vector<index::PageKey> copy_keys(const py::bytes& bytes, const char* name) {
  const std::string_view text = bytes;
  if (text.size() % index::kKeyBytes != 0) {
    raise({base::Code::kInvalid,
           fmt::format("{}: {} bytes, not a multiple of {}", name, text.size(), index::kKeyBytes)});
  }
  std::vector<index::PageKey> keys(text.size() / index::kKeyBytes);
  if (!keys.empty()) std::memcpy(keys.data(), text.data(), text.size());
  return keys;
}

// The digest of an identity.
inline std::array<std::byte, index::kKeyBytes> digest_of(const py::bytes& bytes) {
  const std::string_view text = bytes;
  std::array<std::byte, index::kKeyBytes> digest;
  if (text.size() != digest.size()) {
    raise({base::Code::kInvalid, fmt::format("namespace: {} bytes, must be {}", text.size(), digest.size())});
  }
  std::memcpy(digest.data(), text.data(), digest.size());
  return digest;
}

inline py::bytes bytes_of(const std::vector<index::PageKey>& keys) {
  return {reinterpret_cast<const char*>(keys.data()), keys.size() * index::kKeyBytes};
}

// Slot numbers from Python; one that cannot be a slot becomes kNoSlot, which no pool has.
inline std::vector<index::SlotId> copy_slots(const Array<std::int64_t>& array) {
  std::vector<index::SlotId> slots;
  for (const std::int64_t number : view(array)) {
    const bool possible = number >= 0 && number < static_cast<std::int64_t>(index::to_number(index::kNoSlot));
    slots.push_back(possible ? index::SlotId{static_cast<std::uint32_t>(number)} : index::kNoSlot);
  }
  return slots;
}

inline Array<std::uint8_t> array_of(const std::vector<base::Code>& outcomes) {
  Array<std::uint8_t> array(static_cast<py::ssize_t>(outcomes.size()));
  for (std::size_t i = 0; i < outcomes.size(); ++i)
    array.mutable_data()[i] = static_cast<std::uint8_t>(outcomes[i]);
  return array;
}

inline py::dict dict_of(const std::vector<metrics::Sample>& samples) {
  py::dict answer;
  for (const metrics::Sample& sample : samples) {
    answer[py::str(sample.name)] =
        std::visit([](const auto& value) -> py::object { return py::cast(value); }, sample.value);
  }
  return answer;
}

// Destroying what has threads waits for them: never with the GIL held, which a log line of theirs may need.
template <typename T>
struct DeleteWithoutGil {
  void operator()(T* object) const {
    const ReleasedGil released;
    delete object;
  }
};
template <typename T>
using Holder = std::unique_ptr<T, DeleteWithoutGil<T>>;

}  // namespace tpusync::binding
