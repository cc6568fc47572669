// Gradients of activations, gated activations, and the sum of squares.
#include "kernels/pointwise.h"

#include "kernels/fused.h"

namespace onnxpar {
namespace {

#define ONNXPAR_RULE(other, name) {"dy", other, #name, ONNXPAR_CHOICE(name)}
constexpr Pointwise::Rule kRelu = ONNXPAR_RULE("y", relu_grad);
constexpr Pointwise::Rule kTanh = ONNXPAR_RULE("y", tanh_grad);
constexpr Pointwise::Rule kSigmoid = ONNXPAR_RULE("y", sigmoid_grad);
constexpr Pointwise::Rule kGelu = ONNXPAR_RULE("x", gelu_grad);
constexpr Pointwise::Rule kGeluTanh = ONNXPAR_RULE("x", gelu_tanh_grad);
constexpr Pointwise::Rule kSilu = ONNXPAR_RULE("x", silu_grad);

#define ONNXPAR_GATED(name) {"gate", "up", #name, ONNXPAR_CHOICE(name)}
constexpr Pointwise::Rule kGatedGelu = ONNXPAR_GATED(gated_gelu);
constexpr Pointwise::Rule kGatedGeluTanh = ONNXPAR_GATED(gated_gelu_tanh);
constexpr Pointwise::Rule kGatedSilu = ONNXPAR_GATED(gated_silu);

#define ONNXPAR_GATED_GRAD(name) {#name, ONNXPAR_CHOICE(name)}
constexpr GatedGrad::Rule kGatedGeluGrad = ONNXPAR_GATED_GRAD(gated_gelu_grad);
constexpr GatedGrad::Rule kGatedGeluTanhGrad = ONNXPAR_GATED_GRAD(gated_gelu_tanh_grad);
constexpr GatedGrad::Rule kGatedSiluGrad = ONNXPAR_GATED_GRAD(gated_silu_grad);

Operator gradient(const char* name, decltype(Operator::make) make) {
  return {name, {{}, {}}, {port_like(like<0>)}, in_place<0>, std::move(make)};
}

Operator gated(const char* name, const Pointwise::Rule& rule) {
  return {name, {{}, {}}, {port_like(like<0>)}, in_place<0>, fused<Pointwise>(rule)};
}

Operator gated_gradient(const char* name, const GatedGrad::Rule& rule) {
  return {name, {{}, {}, {}}, {port_like(like<1>), port_like(like<2>)}, in_place<0, 2>,
          fused<GatedGrad>(rule)};
}

// Of 16-bit inputs float32.
Inferred wide_scalar(const ShapeQuery& query) {
  const bool is_double = query.input(0).type == kDouble;
  return SymbolicTensor{is_double ? kDouble : kFloat, {}, {}};
}

}  // namespace

Pointwise::Operands Pointwise::read(const Io& io) const {
  const Tensor x = io.input(0);
  const Tensor other = io.input(1);
  expect_like(other, rule_.other, x, rule_.first);
  expect_float(x, rule_.first);
  return {x, other, output_like(io, 0, x)};
}

GatedGrad::Operands GatedGrad::read(const Io& io) const {
  const Tensor dy = io.input(0);
  const Tensor gate = io.input(1);
  const Tensor up = io.input(2);
  expect_like(gate, "gate", dy, "dy");
  expect_like(up, "up", dy, "dy");
  expect_float(dy, "dy");
  return {dy, gate, up, output_like(io, 0, dy), output_like(io, 1, dy)};
}

SquareSum::Operands SquareSum::read(const Io& io) const {
  Operands o{};
  const size_t inputs = io.inputs();
  for (size_t i = 0; i < inputs; ++i) {
    o.inputs.push_back(io.input(i));
    if (i == 0) expect_float(o.inputs[0], "x");
    else expect_type(o.inputs[i], "an input", o.inputs[0].type);
  }
  o.sum = io.output(0, {});
  return o;
}

std::vector<Operator> pointwise_operators() {
  return {gradient("ReluGrad", fused<Pointwise>(kRelu)),
          gradient("TanhGrad", fused<Pointwise>(kTanh)),
          gradient("SigmoidGrad", fused<Pointwise>(kSigmoid)),
          gradient("GeluGrad", fused<Pointwise>(kGelu)),
          gradient("GeluTanhGrad", fused<Pointwise>(kGeluTanh)),
          gradient("SiluGrad", fused<Pointwise>(kSilu)),
          gated("GatedGelu", kGatedGelu),
          gated("GatedGeluTanh", kGatedGeluTanh),
          gated("GatedSilu", kGatedSilu),
          gated_gradient("GatedGeluGrad", kGatedGeluGrad),
          gated_gradient("GatedGeluTanhGrad", kGatedGeluTanhGrad),
          gated_gradient("GatedSiluGrad", kGatedSiluGrad),
          {"SquareSum", {{kAny, ort::kVariadic}}, {port_like(wide_scalar)}, never_in_place,
           fused<SquareSum>()}};
}

}  // namespace onnxpar
