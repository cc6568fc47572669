// Gradients of activations, and the sum of squares.
#include "kernels/checks.h"
#include "kernels/device/kernels.h"

namespace onnxpar {
namespace {

// `select` gives the loop out of Loops<T>; `other` is what the second input is called.
template <class Select>
Compute pointwise(const char* other, Select select) {
  return [=](const Io& io) {
    const Pointwise inputs = pointwise_inputs(io, other);
    const Tensor& dy = inputs.dy;
    with_real(dy, "dy", [&](auto zero) {
      using T = decltype(zero);
      const Reader<T> from(dy, "dy");
      const Reader<T> at(inputs.y, other);
      Writer<T> dx(io, 0, dy.shape, dy.type);
      const auto loop = select(simd().of<T>());
      pieces(io, dy.count(), kPiece, [&](size_t begin, size_t n) {
        loop(dx.data() + begin, from.data() + begin, at.data() + begin, n);
      });
      dx.finish();
    });
  };
}

Compute relu_grad(const Attributes&, size_t) {
  return pointwise("y", [](const auto& loops) { return loops.relu_grad; });
}

Compute tanh_grad(const Attributes&, size_t) {
  return pointwise("y", [](const auto& loops) { return loops.tanh_grad; });
}

Compute sigmoid_grad(const Attributes&, size_t) {
  return pointwise("y", [](const auto& loops) { return loops.sigmoid_grad; });
}

Compute gelu_grad(const Attributes& attributes, size_t) {
  if (gelu_is_tanh(attributes)) {
    return pointwise("x", [](const auto& loops) { return loops.gelu_tanh_grad; });
  }
  return pointwise("x", [](const auto& loops) { return loops.gelu_grad; });
}

double square_sum_of(const Io& io, const Tensor& x) {
  double sum = 0;
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const Reader<T> from(x, "x");
    const auto loop = simd().of<T>().square_sum;
    const size_t count = x.count();
    std::vector<double> sums((count + kPiece - 1) / kPiece);
    pieces(io, count, kPiece, [&](size_t begin, size_t n) {
      sums[begin / kPiece] = loop(from.data() + begin, n);
    });
    for (double part : sums) sum += part;
  });
  return sum;
}

Compute square_sum(const Attributes&, size_t) {
  return [](const Io& io) {
    const Tensor first = io.input(0);
    double sum = square_sum_of(io, first);
    const size_t inputs = io.inputs();
    for (size_t i = 1; i < inputs; ++i) {
      const Tensor x = io.input(i);
      expect_type(x, "an input", first.type);
      sum += square_sum_of(io, x);
    }
    void* out = io.output(0, {});
    if (first.type == DType::kFloat64) *static_cast<double*>(out) = sum;
    else *static_cast<float*>(out) = static_cast<float>(sum);
  };
}

}  // namespace

const std::vector<KernelSpec>& pointwise_kernels() {
  static const std::vector<KernelSpec> all = {
      {"ReluGrad", {kAny, kAny}, 0, false, {{0}}, false, in_place<0>, relu_grad, cuda::relu_grad},
      {"TanhGrad", {kAny, kAny}, 0, false, {{0}}, false, in_place<0>, tanh_grad, cuda::tanh_grad},
      {"SigmoidGrad",
       {kAny, kAny},
       0,
       false,
       {{0}},
       false,
       in_place<0>,
       sigmoid_grad,
       cuda::sigmoid_grad},
      {"GeluGrad", {kAny, kAny}, 0, false, {{0}}, false, in_place<0>, gelu_grad, cuda::gelu_grad},
      {"SquareSum",
       {kAny},
       0,
       true,
       {{0, Like::Shape::kScalar, true}},
       false,
       never_in_place,
       square_sum,
       cuda::square_sum},
  };
  return all;
}

}  // namespace onnxpar
