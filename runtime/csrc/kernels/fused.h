// A fused operator is one class. Its constructor reads the attributes of a node, `read` a call's
// operands, which it checks, and allocates its outputs; `host` (in host/) and `device` (in device/)
// compute, on the one provider or the other:
//
//   explicit Op(const Node& node);                            throws std::invalid_argument
//   Operands read(const Io& io) const;                        throws std::invalid_argument
//   void host(const Io& io, const Operands& operands) const;
//   void device(const Io& io, const Operands& operands) const;
//
// On a device nobody waits for what is computed, so what depends on values cannot be an error of the
// call there: see FaultReport in device/queue.h.
#pragma once

#include <memory>
#include <utility>

#include "abi/cuda_compiler.h"
#include "abi/cuda_driver.h"
#include "abi/operator.h"

namespace onnxpar {

template <class Op>
class FusedKernel : public Kernel {
 public:
  template <class... Args>
  explicit FusedKernel(const Node& node, const Args&... args)
      : Kernel(node.where), op_(node, args...), on_device_(node.on_device) {}
  void compute(const Io& io) override {
    const auto operands = op_.read(io);
    if (on_device_) op_.device(io, operands);
    else op_.host(io, operands);
  }

 private:
  const Op op_;
  const bool on_device_;
};

// What makes the kernels of an operator; `args` follow the node in the constructor of its class.
template <class Op, class... Args>
auto fused(Args... args) {
  return [args...](const Node& node) -> std::unique_ptr<Kernel> {
    if (node.on_device) {
      // Reports what is missing before anything runs.
      cuda::driver();
      cuda::load_compiler();
    }
    return std::make_unique<FusedKernel<Op>>(node, args...);
  };
}

// Shape and type of an input, for one of the same.
template <size_t kInput>
Inferred like(const ShapeQuery& query) {
  SymbolicTensor x = query.input(kInput);
  if (x.shape.empty()) return std::nullopt;
  return x;
}

inline OutPort port_like(Inferred (*infer)(const ShapeQuery&),
                           int characteristic = ort::kRequired) {
  return {kAny, characteristic, infer};
}

// The operators of each family, for fused_operators().
std::vector<Operator> accumulate_operators();
std::vector<Operator> attention_operators();
std::vector<Operator> pointwise_operators();
std::vector<Operator> rotary_operators();
std::vector<Operator> row_operators();
std::vector<Operator> loss_operators();
std::vector<Operator> channel_operators();
std::vector<Operator> filter_operators();
std::vector<Operator> gather_operators();
std::vector<Operator> step_operators();
std::vector<Operator> philox_operators();
std::vector<Operator> standard_operators();

}  // namespace onnxpar
