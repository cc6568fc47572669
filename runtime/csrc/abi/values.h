// Common types of all parts of the library: shapes, streams, the attributes of a node.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace onnxpar {

using Shape = std::vector<int64_t>;

// The queue of the device on which data is produced and consumed (a cudaStream_t), null for host
// memory. Host transports ignore it; device transports enqueue on it.
using Stream = void*;

// Reads attributes of a node, from any interface.
class Attributes {
 public:
  virtual ~Attributes() = default;
  virtual std::optional<int64_t> integer(const char* name) const = 0;
  virtual std::optional<std::string> text(const char* name) const = 0;
  virtual std::optional<std::vector<int64_t>> integers(const char* name) const = 0;
  virtual std::optional<double> real(const char* name) const = 0;
  // Throw std::invalid_argument if the attribute is missing.
  int64_t need_integer(const char* name) const;
};

// The product of all dims, or of those from `begin` to `end` - 1. Throws std::invalid_argument if one of
// them is negative, or if the product is 2^63 or more.
size_t product(const Shape& shape, size_t begin, size_t end);
inline size_t product(const Shape& shape) { return product(shape, 0, shape.size()); }

// "[1, 2]"
std::string to_text(const std::vector<int>& values);
std::string to_text(const std::vector<int64_t>& values);

}  // namespace onnxpar
