#include "kernels/checks.h"

namespace onnxpar {

void expect_float(const Tensor& tensor, const char* name) {
  with_real(tensor, name, [](auto) {});
}

Pointwise pointwise_inputs(const Io& io, const char* other) {
  Pointwise p{io.input(0), io.input(1)};
  expect_like(p.y, other, p.dy, "dy");
  expect_float(p.dy, "dy");
  return p;
}

bool gelu_is_tanh(const Attributes& attributes) {
  const std::string approximate = attributes.text("approximate").value_or("none");
  if (approximate != "none" && approximate != "tanh") {
    throw std::invalid_argument("approximate is '" + approximate + "', expected none or tanh");
  }
  return approximate == "tanh";
}

Softmax softmax_inputs(const Io& io, int64_t axis) {
  Softmax s{io.input(0), io.input(1), 0, 0, 0};
  expect_like(s.y, "y", s.dy, "dy");
  expect_float(s.dy, "dy");
  const Shape& shape = s.dy.shape;
  const size_t at = axis_of(shape, axis);
  s.outer = product(shape, 0, at);
  s.n = static_cast<size_t>(shape[at]);
  s.inner = product(shape, at + 1, shape.size());
  return s;
}

LayerNorm layer_norm_inputs(const Io& io, int64_t axis) {
  LayerNorm l{io.input(0), io.input(1), io.input(2), io.input(3), io.input(4), 0, 0};
  expect_like(l.dy, "dy", l.x, "x");
  expect_type(l.scale, "scale", l.x.type);
  expect_float(l.x, "x");
  expect_float(l.mean, "mean");
  expect_float(l.inv_std, "inv_std");
  const Shape& shape = l.x.shape;
  const size_t at = axis_of(shape, axis);
  l.rows = product(shape, 0, at);
  l.n = product(shape, at, shape.size());
  expect_count(l.scale, "scale", l.n, "one for each in a row");
  expect_count(l.mean, "mean", l.rows, "one for each row");
  expect_count(l.inv_std, "inv_std", l.rows, "one for each row");
  return l;
}

LossReduction loss_reduction(const Attributes& attributes) {
  const std::string name = attributes.text("reduction").value_or("mean");
  if (name == "mean") return LossReduction::kMean;
  if (name == "sum") return LossReduction::kSum;
  if (name == "none") return LossReduction::kNone;
  throw std::invalid_argument("reduction is '" + name + "', expected mean, sum or none");
}

namespace {

// The inputs from `first` on: scores, labels and perhaps weights.
Labelled labelled(const Io& io, size_t first, const char* name) {
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

}  // namespace

Labelled loss_inputs(const Io& io) { return labelled(io, 0, "scores"); }

LossGrad loss_grad_inputs(const Io& io, LossReduction reduction) {
  LossGrad g{labelled(io, 1, "log_prob"), io.input(0)};
  expect_float(g.dloss, "dloss");
  if (reduction != LossReduction::kNone) {
    expect_one(g.dloss, "dloss");
  } else if (g.dloss.shape != g.of.labels.shape) {
    throw std::invalid_argument("dloss has shape " + to_text(g.dloss.shape) + ", expected " +
                                to_text(g.of.labels.shape) + " as labels");
  }
  return g;
}

Gather gather_inputs(const Io& io, int64_t axis) {
  Gather g{io.input(0), io.input(1), io.input(2), 0, 0, 0, 0};
  expect_type(g.dy, "dy", g.data.type);
  expect_float(g.data, "data");
  const Shape& shape = g.data.shape;
  const size_t at = axis_of(shape, axis);
  const auto place = static_cast<std::ptrdiff_t>(at);
  Shape expected = shape;
  expected.erase(expected.begin() + place);
  expected.insert(expected.begin() + place, g.indices.shape.begin(), g.indices.shape.end());
  if (g.dy.shape != expected) {
    throw std::invalid_argument("dy has shape " + to_text(g.dy.shape) + ", expected " +
                                to_text(expected) + " for data of shape " + to_text(shape) +
                                " and indices of shape " + to_text(g.indices.shape));
  }
  g.outer = product(shape, 0, at);
  g.rows = static_cast<size_t>(shape[at]);
  g.inner = product(shape, at + 1, shape.size());
  g.count = g.indices.count();
  return g;
}

std::vector<Tensor> step_inputs(const Io& io, size_t tensors) {
  constexpr const char* kNames[] = {"p", "g", "m", "v"};
  std::vector<Tensor> all;
  for (size_t i = 0; i < tensors; ++i) {
    all.push_back(io.input(i));
    expect_like(all[i], kNames[i], all[0], "p");
  }
  expect_float(all[0], "p");
  return all;
}

}  // namespace onnxpar
