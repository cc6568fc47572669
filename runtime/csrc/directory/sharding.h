// Which elements of a tensor a rank holds: the arithmetic of `onnxpar_format.boxes` in Python.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "abi/values.h"
#include "directory/expression.h"

namespace onnxpar {

// The elements of a component of a dim that a rank holds: the first, how many are valid, and the local
// size, which is the same on all ranks.
struct DimBlock {
  int64_t start;
  int64_t valid;
  int64_t local;
};

// A component of a dim: its size, an expression, and the atoms that split it.
struct DimComponent {
  std::string size;
  std::vector<int> atoms;
};

// The digits of a rank over the sizes of the atoms, the first atom most significant.
std::vector<int> coordinates(int rank, const std::vector<int>& atoms);

// What one rank holds of a tensor of known size.
struct Shard {
  Shape whole;               // the global shape
  Shape local;               // of every rank, padding included
  std::vector<int64_t> sizes;     // of all components, in order of dims
  std::vector<DimBlock> blocks;   // of all components

  bool padded() const;  // whether this rank's part has padding

  // Copies the rank's elements of a whole tensor to its shard; the padding is not written.
  void take(const void* from, void* to, size_t element_bytes) const;
  // The other way round.
  void put(const void* from, void* to, size_t element_bytes) const;
};

Shard shard_of(const std::vector<std::vector<DimComponent>>& dims, const Values& values,
               const std::vector<int>& atoms, int rank);

}  // namespace onnxpar
