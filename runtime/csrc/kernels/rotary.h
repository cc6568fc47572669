#pragma once

#include "abi/operator.h"
#include "kernels/device/rotary.cuh"
#include "kernels/host/simd.h"
#include "kernels/io.h"

namespace onnxpar {

// Rotary positions whose halves are turned against each other, or the gradient.
class Rotary {
 public:
  struct Rule {
    const char* kernel;  // on a device
    Choice<RotaryLoop> row;
  };
  struct Operands {
    Tensor x;
    Tensor cos;
    Tensor sin;
    Output y;
    size_t rows;
    size_t half;
    cuda::AngleRows angles;
  };
  Rotary(const Node&, const Rule& rule) : rule_(rule) {}
  Operands read(const Io& io) const;
  void host(const Io& io, const Operands& o) const;
  void device(const Io& io, const Operands& o) const;

 private:
  const Rule rule_;
};

}  // namespace onnxpar
