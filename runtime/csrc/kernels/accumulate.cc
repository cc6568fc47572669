// The sum of gradients over micro-batches.
#include "kernels/accumulate.h"

#include "kernels/fused.h"

namespace onnxpar {
namespace {

constexpr int64_t kEarlier = 1;
constexpr int64_t kLater = 2;
constexpr size_t kBefore = 2;  // inputs before the tensors

Inferred one_element(const ShapeQuery&) { return SymbolicTensor{kAny, {1}, {""}}; }

}  // namespace

Accumulate::Operands Accumulate::read(const Io& io) const {
  const int64_t mode = io.input(1).integers().at(0);
  Operands o{(mode & kEarlier) != 0, (mode & kLater) != 0, {}};
  const size_t count = (io.inputs() - kBefore) / 2;
  for (size_t i = 0; i < count; ++i) {
    const Tensor gradient = io.input(kBefore + i);
    const Tensor sum = io.input(kBefore + count + i);
    expect_float(gradient, "a gradient");
    expect_like(sum, "its sum", gradient, "the gradient");
    if (mode != 0) o.pairs.emplace_back(gradient, sum);
  }
  io.output(0, {1});  // only orders nodes
  return o;
}

std::vector<Operator> accumulate_operators() {
  return {{"Accumulate",
           {{kToken}, {kInt64, ort::kRequired, true}, {kAny, ort::kVariadic}},
           {{kToken, ort::kRequired, one_element}},
           never_in_place,
           fused<Accumulate>()}};
}

}  // namespace onnxpar
