// The tensors of a collective: one, or several that it takes in one call, as if one stood after the
// other. So a piece of the data may span several of them, and nothing is copied to put them together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "abi/dtype.h"

namespace onnxpar {

// Elements [begin, end).
struct Range {
  size_t begin;
  size_t end;
  size_t size() const { return end - begin; }
};

// A tensor of a call. The collective says what `count` is, in elements or bytes, and of which memory
// it is the size.
struct Block {
  Block(const void* from, void* to, size_t n)
      : in(static_cast<const std::byte*>(from)), out(static_cast<std::byte*>(to)), count(n) {}
  const std::byte* in;
  std::byte* out;
  size_t count;
};

// Items of an array that others own.
template <class T>
class List {
 public:
  List() = default;
  List(const T& one) : data_(&one), size_(1) {}
  List(const std::vector<T>& all) : data_(all.data()), size_(all.size()) {}
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  size_t size() const { return size_; }
  const T& operator[](size_t index) const { return data_[index]; }

 private:
  const T* data_ = nullptr;
  size_t size_ = 0;
};

class Blocks : public List<Block> {
 public:
  using List::List;

  // Of all together.
  size_t count() const {
    size_t all = 0;
    for (const Block& block : *this) all += block.count;
    return all;
  }

  // Calls f(block, offset, n, at) for each block that has elements of the range: n from `offset` in the
  // block, and from `at` in the range.
  template <class F>
  void each(Range range, F f) const {
    size_t first = 0;  // of the block
    for (const Block& block : *this) {
      const size_t begin = std::max(range.begin, first);
      const size_t end = std::min(range.end, first + block.count);
      if (begin < end) f(block, begin - first, end - begin, begin - range.begin);
      first += block.count;
      if (first >= range.end) return;
    }
  }
};

}  // namespace onnxpar
