// Softmax cross-entropy and its gradient.
#include "kernels/loss.h"

#include "kernels/fused.h"

namespace onnxpar {
namespace {

LossReduction loss_reduction(const Attributes& attributes) {
  const std::string name = attributes.text("reduction").value_or("mean");
  if (name == "mean") return LossReduction::kMean;
  if (name == "sum") return LossReduction::kSum;
  if (name == "none") return LossReduction::kNone;
  throw std::invalid_argument("reduction is '" + name + "', expected mean, sum or none");
}

// One for each label, which are the second input, or all of them in one.
Inferred loss_shape(const ShapeQuery& query) {
  SymbolicTensor loss = query.input(1);
  loss.type = query.input(0).type;
  if (ShapeAttributes(query.context).text("reduction").value_or("mean") != "none") {
    loss.shape.clear();
    loss.names.clear();
  } else if (loss.shape.empty()) {
    return std::nullopt;
  }
  return loss;
}

}  // namespace

LossRule::LossRule(const Node& node)
    : reduction_(loss_reduction(node.attributes)),
      ignore_index_(node.attributes.integer("ignore_index")),
      faults_(std::make_shared<cuda::FaultReport>(node.where, "label", "classes")) {}

Labelled LossRule::labelled(const Io& io, size_t first, const char* name) {
  Labelled l{io.input(first), io.input(first + 1), std::nullopt, 0, 0};
  if (io.inputs() > first + 2) l.weights = io.input(first + 2);
  const Shape& shape = l.scores.shape;
  if (shape.size() < 2) {
    throw std::invalid_argument(std::string(name) + " has shape " + to_text(shape) +
                                ", expected [N, C, ...]");
  }
  expect_float(l.scores, name);
  Shape expected = shape;
  expected.erase(expected.begin() + 1);
  if (l.labels.shape != expected) {
    throw std::invalid_argument("labels has shape " + to_text(l.labels.shape) + ", expected " +
                                to_text(expected) + " for " + name + " of shape " +
                                to_text(shape));
  }
  l.classes = static_cast<size_t>(shape[1]);
  l.inner = product(shape, 2, shape.size());
  if (l.weights) {
    expect_type(*l.weights, "weights", l.scores.type);
    expect_count(*l.weights, "weights", l.classes, "one for each class");
  }
  return l;
}

Loss::Operands Loss::read(const Io& io) const {
  const Labelled l = labelled(io, 0, "scores");
  const bool each = reduction_ == LossReduction::kNone;
  return {l, output(io, 0, each ? l.labels.shape : Shape{}, l.scores.type),
          outputs_ > 1 ? output_like(io, 1, l.scores) : Output{}};
}

LossGrad::Operands LossGrad::read(const Io& io) const {
  const Labelled l = labelled(io, 1, "log_prob");
  const Tensor dloss = io.input(0);
  expect_float(dloss, "dloss");
  if (reduction_ != LossReduction::kNone) {
    expect_one(dloss, "dloss");
  } else if (dloss.shape != l.labels.shape) {
    throw std::invalid_argument("dloss has shape " + to_text(dloss.shape) + ", expected " +
                                to_text(l.labels.shape) + " as labels");
  }
  return {l, dloss, output_like(io, 0, l.scores)};
}

std::vector<Operator> loss_operators() {
  const InPort labels{kInt64};
  const InPort weights{kAny, ort::kOptional};
  return {{"SoftmaxCrossEntropyLoss", {{}, labels, weights},
           {port_like(loss_shape), port_like(like<0>, ort::kOptional)}, never_in_place,
           fused<Loss>()},
          {"SoftmaxCrossEntropyLossGrad", {{}, {}, labels, weights}, {port_like(like<1>)},
           never_in_place, fused<LossGrad>()}};
}

}  // namespace onnxpar
