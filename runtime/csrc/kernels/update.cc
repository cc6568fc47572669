// Steps of optimizers: a parameter and its moments in one pass over memory.
#include "kernels/update.h"

#include "kernels/fused.h"

namespace onnxpar {
namespace {

using Scalars = std::vector<Step::ScalarInput>;

Operator step(const char* name, const Step::Rule& rule, InPlace pairs) {
  Operator of{name, {{}, {}}, {port_like(like<0>)}, pairs, fused<Step>(rule)};
  constexpr Inferred (*kLike[])(const ShapeQuery&) = {like<2>, like<3>};
  for (size_t i = 0; i < rule.moments; ++i) {
    of.inputs.emplace_back();
    of.outputs.push_back(port_like(kLike[i]));
  }
  of.inputs.resize(of.inputs.size() + rule.scalars.size(), {kDouble});
  for (size_t back : {1, 2}) of.inputs[of.inputs.size() - back].characteristic = ort::kOptional;
  return of;
}

constexpr Step::ScalarInput kIfActive = {"active", cuda::kActive};

Scalars adam_scalars(Step::ScalarInput decay) {
  return {{"scale", cuda::kScale},        {"lr_corrected", cuda::kLearning},
          {"beta1", cuda::kKeep1},        {"beta1_complement", cuda::kTake1},
          {"beta2", cuda::kKeep2},        {"beta2_complement", cuda::kTake2},
          {"eps", cuda::kEps},            {"correction2_sqrt", cuda::kCorrection2},
          decay, kIfActive};
}

}  // namespace

Step::Operands Step::read(const Io& io) const {
  constexpr const char* kNames[] = {"p", "g", "m", "v"};
  Operands o{};
  for (size_t i = 0; i < 2 + rule_.moments; ++i) {
    o.from.push_back(io.input(i));
    expect_like(o.from[i], kNames[i], o.from[0], "p");
  }
  expect_float(o.from[0], "p");
  const size_t inputs = io.inputs();
  for (size_t i = o.from.size(); i < inputs; ++i) {
    const ScalarInput& as = rule_.scalars[i - o.from.size()];
    const Tensor scalar = io.input(i);
    expect_type(scalar, as.name, DType::kFloat64);
    expect_one(scalar, as.name);
    o.scalars.of[as.which] = static_cast<const double*>(scalar.data);
  }
  for (size_t i = 0; i <= rule_.moments; ++i) o.to.push_back(output_like(io, i, o.from[0]));
  return o;
}

#define ONNXPAR_STEP(name) #name, ONNXPAR_CHOICE(name)
std::vector<Operator> step_operators() {
  const Step::ScalarInput weight_decay{"weight_decay", cuda::kWeightDecay};
  const Scalars sgd = {{"scale", cuda::kScale}, {"lr", cuda::kLearning}, weight_decay, kIfActive};
  const Scalars momentum = {{"scale", cuda::kScale},         {"lr", cuda::kLearning},
                            {"momentum", cuda::kKeep1},      {"dampening", cuda::kDampening},
                            {"first", cuda::kFirst},         weight_decay, kIfActive};
  const Scalars adam = adam_scalars(weight_decay);
  const Scalars adamw = adam_scalars({"decay", cuda::kDecay});
  return {step("SgdStep", {ONNXPAR_STEP(sgd_step), 0, sgd}, in_place<0>),
          step("MomentumStep", {ONNXPAR_STEP(momentum_step), 1, momentum}, in_place<0, 2>),
          step("AdamStep", {ONNXPAR_STEP(adam_step), 2, adam}, in_place<0, 2, 3>),
          step("AdamWStep", {ONNXPAR_STEP(adam_step), 2, adamw}, in_place<0, 2, 3>)};
}

}  // namespace onnxpar
