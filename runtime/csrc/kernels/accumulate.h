#pragma once

#include <utility>
#include <vector>

#include "abi/operator.h"
#include "kernels/io.h"

namespace onnxpar {

// Adds up the gradients of micro-batches in the memory of its inputs, which are states.
class Accumulate {
 public:
  struct Operands {
    bool earlier;  // `sum` has the gradients of earlier micro-batches
    bool later;    // further micro-batches follow
    std::vector<std::pair<Tensor, Tensor>> pairs;  // of a gradient and a sum
  };
  explicit Accumulate(const Node&) {}
  Operands read(const Io& io) const;
  void host(const Io& io, const Operands& o) const;
  void device(const Io& io, const Operands& o) const;
};

}  // namespace onnxpar
