// Gradients of what normalises rows: softmax, its logarithm, layer and RMS normalisation.
#include "kernels/rows.h"

#include "kernels/fused.h"

namespace onnxpar {
namespace {

#define ONNXPAR_RULE(name) {#name, ONNXPAR_CHOICE(name), ONNXPAR_CHOICE(name##_columns)}
constexpr SoftmaxGrad::Rule kSoftmax = ONNXPAR_RULE(softmax_grad);
constexpr SoftmaxGrad::Rule kLogSoftmax = ONNXPAR_RULE(log_softmax_grad);
constexpr NormGrad::Rule kLayerNorm = {"layer_norm_grad", ONNXPAR_CHOICE(layer_norm_grad), true};
constexpr NormGrad::Rule kRmsNorm = {"rms_norm_grad", ONNXPAR_CHOICE(rms_norm_grad), false};

}  // namespace

SoftmaxGrad::SoftmaxGrad(const Node& node, const Rule& rule)
    : rule_(rule), axis_(node.attributes.integer("axis").value_or(-1)) {}

SoftmaxGrad::Operands SoftmaxGrad::read(const Io& io) const {
  const Tensor dy = io.input(0);
  const Tensor y = io.input(1);
  expect_like(y, "y", dy, "dy");
  expect_float(dy, "dy");
  const Shape& shape = dy.shape;
  const size_t at = axis_of(shape, axis_);
  return {dy,
          y,
          output_like(io, 0, dy),
          product(shape, 0, at),
          static_cast<size_t>(shape[at]),
          product(shape, at + 1, shape.size())};
}

NormGrad::NormGrad(const Node& node, const Rule& rule)
    : rule_(rule),
      axis_(node.attributes.integer("axis").value_or(-1)),
      outputs_(node.outputs) {}

NormGrad::Operands NormGrad::read(const Io& io) const {
  Operands o{io.input(0), io.input(1), io.input(2), {}, io.input(rule_.centred ? 4 : 3), {}, {}, 0, 0};
  if (rule_.centred) o.mean = io.input(3);
  expect_like(o.dy, "dy", o.x, "x");
  expect_type(o.scale, "scale", o.x.type);
  expect_float(o.x, "x");
  if (rule_.centred) expect_float(o.mean, "mean");
  expect_float(o.inv_std, "inv_std");
  const Shape& shape = o.x.shape;
  const size_t at = axis_of(shape, axis_);
  o.rows = product(shape, 0, at);
  o.n = product(shape, at, shape.size());
  expect_count(o.scale, "scale", o.n, "one for each in a row");
  if (rule_.centred) expect_count(o.mean, "mean", o.rows, "one for each row");
  expect_count(o.inv_std, "inv_std", o.rows, "one for each row");
  o.dx = output_like(io, 0, o.x);
  for (size_t i = 1; i < outputs_; ++i) o.sums[i - 1] = output_like(io, i, o.scale);
  return o;
}

std::vector<Operator> row_operators() {
  const OutPort dx = port_like(like<0>);
  const OutPort sums = port_like(like<2>, ort::kOptional);
  return {{"SoftmaxGrad", {{}, {}}, {dx}, in_place<0>, fused<SoftmaxGrad>(kSoftmax)},
          {"LogSoftmaxGrad", {{}, {}}, {dx}, in_place<0>, fused<SoftmaxGrad>(kLogSoftmax)},
          {"LayerNormalizationGrad", {{}, {}, {}, {}, {}}, {port_like(like<1>), sums, sums},
           in_place<0>, fused<NormGrad>(kLayerNorm)},
          {"RMSNormalizationGrad", {{}, {}, {}, {}}, {port_like(like<1>), sums}, in_place<0>,
           fused<NormGrad>(kRmsNorm)}};
}

}  // namespace onnxpar
