// Gradients of what normalises rows: softmax, its logarithm and layer normalisation.
#include "kernels/rows.h"

#include "kernels/fused.h"

namespace onnxpar {
namespace {

#define ONNXPAR_RULE(name) {#name, ONNXPAR_CHOICE(name), ONNXPAR_CHOICE(name##_columns)}
constexpr SoftmaxGrad::Rule kSoftmax = ONNXPAR_RULE(softmax_grad);
constexpr SoftmaxGrad::Rule kLogSoftmax = ONNXPAR_RULE(log_softmax_grad);

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

LayerNormGrad::LayerNormGrad(const Node& node)
    : axis_(node.attributes.integer("axis").value_or(-1)), outputs_(node.outputs) {}

LayerNormGrad::Operands LayerNormGrad::read(const Io& io) const {
  Operands o{io.input(0), io.input(1), io.input(2), io.input(3), io.input(4), {}, {}, 0, 0};
  expect_like(o.dy, "dy", o.x, "x");
  expect_type(o.scale, "scale", o.x.type);
  expect_float(o.x, "x");
  expect_float(o.mean, "mean");
  expect_float(o.inv_std, "inv_std");
  const Shape& shape = o.x.shape;
  const size_t at = axis_of(shape, axis_);
  o.rows = product(shape, 0, at);
  o.n = product(shape, at, shape.size());
  expect_count(o.scale, "scale", o.n, "one for each in a row");
  expect_count(o.mean, "mean", o.rows, "one for each row");
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
           in_place<0>, fused<LayerNormGrad>()}};
}

}  // namespace onnxpar
