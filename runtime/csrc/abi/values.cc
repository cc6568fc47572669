#include "abi/values.h"

#include <algorithm>
#include <stdexcept>

namespace onnxpar {
namespace {

template <class T>
std::string join(const std::vector<T>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) {
    if (i != 0) text += ", ";
    text += std::to_string(values[i]);
  }
  return text + "]";
}

}  // namespace

std::string to_text(const std::vector<int>& values) { return join(values); }
std::string to_text(const std::vector<int64_t>& values) { return join(values); }

size_t product(const Shape& shape, size_t begin, size_t end) {
  const auto first = shape.begin() + static_cast<std::ptrdiff_t>(begin);
  const auto last = shape.begin() + static_cast<std::ptrdiff_t>(end);
  if (std::any_of(first, last, [](int64_t dim) { return dim < 0; })) {
    throw std::invalid_argument("shape " + to_text(shape) + " has a negative dim");
  }
  if (std::find(first, last, 0) != last) return 0;
  int64_t n = 1;
  for (auto dim = first; dim != last; ++dim) {
    if (__builtin_mul_overflow(n, *dim, &n)) {
      throw std::invalid_argument("shape " + to_text(shape) + " has 2^63 elements or more");
    }
  }
  return static_cast<size_t>(n);
}

int64_t Attributes::need_integer(const char* name) const {
  const std::optional<int64_t> value = integer(name);
  if (!value) throw std::invalid_argument(std::string("attribute ") + name + " is missing");
  return *value;
}

}  // namespace onnxpar
