#pragma once

#include "abi/operator.h"
#include "kernels/host/philox.h"
#include "kernels/io.h"

namespace onnxpar {

// The same numbers on every device, to the bit.
class Philox {
 public:
  struct Operands {
    std::vector<int64_t> key;
    Shape shape;
    Shape global;
    Shape start;
    uint64_t count;
    float* out;
  };
  explicit Philox(const Node& node);
  Operands read(const Io& io) const;
  void host(const Io& io, const Operands& o) const;
  void device(const Io& io, const Operands& o) const;

 private:
  Distribution distribution_ = Distribution::kUniform;
};

}  // namespace onnxpar
