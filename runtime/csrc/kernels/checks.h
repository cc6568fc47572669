// What the kernels of one operator, on the host and on a device, ask of its inputs: types, shapes
// and attributes. All throw std::invalid_argument.
#pragma once

#include "kernels/io.h"

namespace onnxpar {

// Throws where the tensor's elements are no float type.
void expect_float(const Tensor& tensor, const char* name);

// The node's first two inputs, alike.
struct Pointwise {
  Tensor dy;
  Tensor y;
};
Pointwise pointwise_inputs(const Io& io, const char* other);
bool gelu_is_tanh(const Attributes& attributes);

// `n` elements along the axis, `inner` apart, in each of `outer` slabs.
struct Softmax {
  Tensor dy;
  Tensor y;
  size_t outer;
  size_t n;
  size_t inner;
};
Softmax softmax_inputs(const Io& io, int64_t axis);

struct LayerNorm {
  Tensor dy;
  Tensor x;
  Tensor scale;
  Tensor mean;
  Tensor inv_std;
  size_t rows;
  size_t n;  // elements of a row
};
LayerNorm layer_norm_inputs(const Io& io, int64_t axis);

enum class LossReduction { kMean, kSum, kNone };
LossReduction loss_reduction(const Attributes& attributes);

// Labels of scores (or their logarithms) of shape [N, C, ...].
struct Labelled {
  Tensor scores;
  Tensor labels;
  std::optional<Tensor> weights;
  size_t classes;
  size_t inner;  // the dims after C, together
};
Labelled loss_inputs(const Io& io);
// The same of the gradient, whose scores are logarithms of probabilities.
struct LossGrad {
  Labelled of;
  Tensor dloss;
};
LossGrad loss_grad_inputs(const Io& io, LossReduction reduction);

// `rows` rows of `inner` elements in each of `outer` slabs, and how many are taken of each slab.
struct Gather {
  Tensor dy;
  Tensor indices;
  Tensor data;
  size_t outer;
  size_t rows;
  size_t inner;
  size_t count;
};
Gather gather_inputs(const Io& io, int64_t axis);

// p, g and the moments, alike. `tensors` counts them.
std::vector<Tensor> step_inputs(const Io& io, size_t tensors);

}  // namespace onnxpar
