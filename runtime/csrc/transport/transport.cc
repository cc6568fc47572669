#include "transport/transport.h"

#include <algorithm>
#include <cmath>
#include <vector>

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

std::string differing(const std::string& text, const std::string& other) {
  const auto parts = [](const std::string& all) {
    std::vector<std::string> found;
    for (size_t begin = 0; begin <= all.size();) {
      const size_t end = std::min(all.find(kNextTensor, begin), all.size());
      found.push_back(all.substr(begin, end - begin));
      begin = end + kNextTensor.size();
    }
    return found;
  };
  const std::vector<std::string> own = parts(text);
  const std::vector<std::string> theirs = parts(other);
  size_t i = 1;
  while (i < own.size() && i < theirs.size() && own[i] == theirs[i]) ++i;
  std::string shown = own[0];
  if (i < own.size()) shown += (i > 1 ? " …" : " ") + own[i];
  return shown;
}

std::string describe(int rank, const Call& call, const std::vector<int>& group) {
  return "rank " + std::to_string(rank) + ": " + std::string(call.where) + " on group " + to_text(group);
}

std::string waited(const std::string& who, double seconds, const std::vector<int>& missing) {
  std::string ranks = "the other ranks";
  if (!missing.empty()) {
    ranks = missing.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < missing.size(); ++i) {
      if (i != 0) ranks += i + 1 == missing.size() ? " and " : ", ";
      ranks += std::to_string(missing[i]);
    }
  }
  return who + ": waited " + std::to_string(std::lround(seconds)) + " s for " + ranks +
         " (ONNXPAR_TIMEOUT)";
}

std::vector<int> ranks_at(const std::vector<int>& group, const std::vector<int>& indices) {
  std::vector<int> ranks;
  for (int index : indices) ranks.push_back(group[static_cast<size_t>(index)]);
  return ranks;
}

}  // namespace onnxpar
