#include "transport/transport.h"

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

std::string Call::text() const {
  const std::string more = detail();
  return std::string(where) + (more.empty() ? "" : " with " + more);
}

std::string describe(int rank, const Call& call, const std::vector<int>& group) {
  return "rank " + std::to_string(rank) + ": " + std::string(call.where) + " on group " + to_text(group);
}

}  // namespace onnxpar
