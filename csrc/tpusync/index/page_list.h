// A doubly linked list of page numbers, each in it at most once. For replays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tpusync::index {

// Thread-compatible.
class PageList {
 public:
  explicit PageList(std::uint32_t num_pages) : links_(num_pages + 1) {
    links_.back() = {num_pages, num_pages, true};
  }

  std::size_t size() const { return size_; }
  bool contains(std::uint32_t page) const { return links_[page].used; }
  std::uint32_t back() const { return links_.back().prev; }  // of a list that is not empty

  void push_front(std::uint32_t page) {
    const auto end = static_cast<std::uint32_t>(links_.size() - 1);
    const std::uint32_t next = links_[end].next;
    links_[page] = {end, next, true};
    links_[end].next = links_[next].prev = page;
    ++size_;
  }
  void erase(std::uint32_t page) {
    Links& links = links_[page];
    links_[links.prev].next = links.next;
    links_[links.next].prev = links.prev;
    links.used = false;
    --size_;
  }

 private:
  struct Links {
    std::uint32_t prev = 0;
    std::uint32_t next = 0;
    bool used = false;
  };
  std::vector<Links> links_;  // the last one is the end of the ring
  std::size_t size_ = 0;
};

}  // namespace tpusync::index
