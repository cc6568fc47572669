#include "transport/transport.h"

namespace onnxpar {
std::string Call::text() const {
  const std::string more = detail();
  return std::string(where) + (more.empty() ? "" : " with " + more);
}

std::string describe(int rank, const Call& call, const std::vector<int>& group) {
  return "rank " + std::to_string(rank) + ": " + std::string(call.where) + " on group " + to_text(group);
}

}  // namespace onnxpar
