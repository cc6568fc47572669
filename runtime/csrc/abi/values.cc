#include "abi/values.h"

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

int64_t Attributes::need_integer(const char* name) const {
  const std::optional<int64_t> value = integer(name);
  if (!value) throw std::invalid_argument(std::string("attribute ") + name + " is missing");
  return *value;
}

}  // namespace onnxpar
