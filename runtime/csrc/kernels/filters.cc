// Weights of convolutions in another order.
#include "kernels/filters.h"

#include "kernels/fused.h"

namespace onnxpar {

TurnedWeights::TurnedWeights(const Node& node)
    : groups_(node.attributes.integer("group").value_or(1)) {
  if (groups_ < 1) {
    throw std::invalid_argument("group is " + std::to_string(groups_) + ", expected at least 1");
  }
}

TurnedWeights::Operands TurnedWeights::read(const Io& io) const {
  const Tensor w = io.input(0);
  expect_float(w, "w");
  Shape shape = w.shape;
  if (shape.size() < 2 || shape[0] % groups_ != 0) {
    throw std::invalid_argument("w has shape " + to_text(shape) + ", expected at least 2 dims and " +
                                std::to_string(groups_) + " groups of channels");
  }
  const int64_t many = shape[0] / groups_;
  const int64_t few = shape[1];
  shape[0] = groups_ * few;
  shape[1] = many;
  return {w,
          output(io, 0, shape, w.type),
          static_cast<size_t>(groups_),
          static_cast<size_t>(many),
          static_cast<size_t>(few),
          product(shape, 2, shape.size())};
}

std::vector<Operator> filter_operators() {
  return {{"TurnedWeights", {{}}, {{}}, never_in_place, fused<TurnedWeights>()}};
}

}  // namespace onnxpar
