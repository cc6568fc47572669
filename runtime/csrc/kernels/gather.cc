// Gradient of Gather.
#include "kernels/gather.h"

#include "kernels/fused.h"

namespace onnxpar {

GatherGrad::GatherGrad(const Node& node)
    : axis_(node.attributes.integer("axis").value_or(0)),
      faults_(std::make_shared<cuda::FaultReport>(node.where, "index", "rows")) {}

GatherGrad::Operands GatherGrad::read(const Io& io) const {
  const Tensor dy = io.input(0);
  const Tensor indices = io.input(1);
  const Tensor data = io.input(2);
  expect_type(dy, "dy", data.type);
  expect_float(data, "data");
  const size_t at = axis_of(data.shape, axis_);
  const auto place = static_cast<std::ptrdiff_t>(at);
  Shape expected = data.shape;
  expected.erase(expected.begin() + place);
  expected.insert(expected.begin() + place, indices.shape.begin(), indices.shape.end());
  if (dy.shape != expected) {
    throw std::invalid_argument("dy has shape " + to_text(dy.shape) + ", expected " +
                                to_text(expected) + " for data of shape " + to_text(data.shape) +
                                " and indices of shape " + to_text(indices.shape));
  }
  const Shape& shape = data.shape;
  return {dy,
          indices,
          output_like(io, 0, data),
          product(shape, 0, at),
          static_cast<size_t>(shape[at]),
          product(shape, at + 1, shape.size()),
          indices.count()};
}

std::vector<Operator> gather_operators() {
  return {{"GatherGrad", {{}, {kInt64}, {}}, {port_like(like<2>)}, never_in_place,
           fused<GatherGrad>()}};
}

}  // namespace onnxpar
