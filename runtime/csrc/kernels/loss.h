#pragma once

#include <memory>

#include "abi/operator.h"
#include "kernels/device/loss.cuh"
#include "kernels/device/queue.h"
#include "kernels/io.h"

namespace onnxpar {

using cuda::LossReduction;

// Labels of scores (or their logarithms) of shape [N, C, ...].
struct Labelled {
  Tensor scores;
  Tensor labels;
  std::optional<Tensor> weights;
  size_t classes;
  size_t inner;  // the dims after C, together
};

// What the loss and its gradient have in common.
class LossRule {
 protected:
  explicit LossRule(const Node& node);
  // The inputs from `first` on: scores, called by `name`, labels and perhaps weights.
  static Labelled labelled(const Io& io, size_t first, const char* name);
  // The same for kernels on a device.
  cuda::Labels device_labels(const Labelled& of) const;

  const LossReduction reduction_;
  const std::optional<int64_t> ignore_index_;
  const std::shared_ptr<cuda::FaultReport> faults_;
};

class Loss : LossRule {
 public:
  struct Operands {
    Labelled of;
    Output loss;
    Output log_prob;
  };
  explicit Loss(const Node& node) : LossRule(node), outputs_(node.outputs) {}
  Operands read(const Io& io) const;
  void host(const Io& io, const Operands& o) const;
  void device(const Io& io, const Operands& o) const;

 private:
  const size_t outputs_;
};

class LossGrad : LossRule {
 public:
  struct Operands {
    Labelled of;  // the scores are logarithms of probabilities
    Tensor dloss;
    Output dx;
  };
  explicit LossGrad(const Node& node) : LossRule(node) {}
  Operands read(const Io& io) const;
  void host(const Io& io, const Operands& o) const;
  void device(const Io& io, const Operands& o) const;
};

}  // namespace onnxpar
