#include "transport/transport.h"

#include <algorithm>

namespace onnxpar {

Range share_of(size_t count, int members, int index) {
  constexpr size_t kLine = 64;  // elements, of at least a byte each
  const size_t n = static_cast<size_t>(members);
  const size_t each = ((count + n - 1) / n + kLine - 1) / kLine * kLine;
  const size_t begin = std::min(count, each * static_cast<size_t>(index));
  return {begin, std::min(count, begin + each)};
}

std::string Call::text() const {
  const std::string more = detail();
  return std::string(where) + (more.empty() ? "" : " with " + more);
}

std::string describe(int rank, const Call& call, const std::vector<int>& group) {
  return "rank " + std::to_string(rank) + ": " + std::string(call.where) + " on group " + to_text(group);
}

}  // namespace onnxpar
