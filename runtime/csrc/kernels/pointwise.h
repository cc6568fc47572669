#pragma once

#include "abi/operator.h"
#include "kernels/host/simd.h"
#include "kernels/io.h"

namespace onnxpar {

// The gradient of an activation, or an activation times another tensor.
class Pointwise {
 public:
  struct Rule {
    const char* first;   // what the inputs are called
    const char* other;
    const char* kernel;  // on a device
    Choice<GradLoop> loop;
  };
  struct Operands {
    Tensor x;
    Tensor other;
    Output y;
  };
  Pointwise(const Node&, const Rule& rule) : rule_(rule) {}
  Operands read(const Io& io) const;
  void host(const Io& io, const Operands& o) const;
  void device(const Io& io, const Operands& o) const;

 private:
  const Rule rule_;
};

// The gradient of the activation of a gate times another tensor.
class GatedGrad {
 public:
  struct Rule {
    const char* kernel;  // on a device
    Choice<GateLoop> loop;
  };
  struct Operands {
    Tensor dy;
    Tensor gate;
    Tensor up;
    Output dgate;
    Output dup;
  };
  GatedGrad(const Node&, const Rule& rule) : rule_(rule) {}
  Operands read(const Io& io) const;
  void host(const Io& io, const Operands& o) const;
  void device(const Io& io, const Operands& o) const;

 private:
  const Rule rule_;
};

class SquareSum {
 public:
  struct Operands {
    std::vector<Tensor> inputs;
    void* sum;  // float64 for float64 inputs, else float32
  };
  explicit SquareSum(const Node&) {}
  Operands read(const Io& io) const;
  void host(const Io& io, const Operands& o) const;
  void device(const Io& io, const Operands& o) const;
};

}  // namespace onnxpar
