#pragma once

#include "abi/operator.h"
#include "kernels/device/update.cuh"
#include "kernels/host/simd.h"
#include "kernels/io.h"

namespace onnxpar {

// A step of an optimizer.
class Step {
 public:
  // A scalar input: what it is called, and which it is.
  struct ScalarInput {
    const char* name;
    cuda::Scalar which;
  };
  struct Rule {
    const char* kernel;  // on a device
    Choice<StepLoop> loop;
    size_t moments;
    std::vector<ScalarInput> scalars;  // in order; the last two may be left out
  };
  struct Operands {
    std::vector<Tensor> from;  // p, g and the moments, alike
    std::vector<Output> to;    // p and the moments
    cuda::Scalars scalars;
  };
  Step(const Node&, const Rule& rule) : rule_(rule) {}
  Operands read(const Io& io) const;
  void host(const Io& io, const Operands& o) const;
  void device(const Io& io, const Operands& o) const;

 private:
  const Rule rule_;
};

}  // namespace onnxpar
