// Standard operators that onnxruntime's CUDA provider lacks: on a GPU alone. Sessions of ranks
// without one expand the function that a graph carries, to the standard operator.
#include "kernels/device/queue.h"
#include "kernels/device/standard.cuh"
#include "kernels/fused.h"
#include "kernels/io.h"
#include "kernels/pool.h"

namespace onnxpar {

using namespace cuda;

namespace {

// What no host does: no kernel for one is ever made.
struct OnDevice {
  template <class Operands>
  void host(const Io&, const Operands&) const {}
};

// An attribute of a function, with its value where a node does not say; "" is none.
struct Real {
  const char* name = "";
  double otherwise = 0;
};

class Elementwise : public OnDevice {
 public:
  struct Operands {
    Tensor x;
    Output y;
  };
  Elementwise(const Node& node, const char* kernel, Real alpha, Real gamma)
      : kernel_(kernel), alpha_(value(node, alpha)), gamma_(value(node, gamma)) {}
  Operands read(const Io& io) const {
    const Tensor x = io.input(0);
    expect_float(x, "x");
    return {x, output_like(io, 0, x)};
  }
  void device(const Io& io, const Operands& o) const {
    const size_t count = o.x.count();
    Queue queue(io, "standard.cu", o.x.type);
    queue.launch(kernel_, over(count, pack(o.x.type)), o.y.data, o.x.data,
                 static_cast<Index>(count), alpha_, gamma_);
  }

 private:
  static double value(const Node& node, Real real) {
    return *real.name == '\0' ? 0 : node.attributes.real(real.name).value_or(real.otherwise);
  }
  const char* const kernel_;
  const double alpha_;
  const double gamma_;
};

class MaxPool : public OnDevice {
 public:
  struct Operands {
    Tensor x;
    Output y;
    Output indices;
    Window window;
  };
  explicit MaxPool(const Node& node) : windows_(node.attributes), outputs_(node.outputs) {
    if (windows_.space() > kSpace) {
      throw std::invalid_argument("kernel_shape has " + std::to_string(windows_.space()) +
                                  " dims, expected at most 3");
    }
  }
  Operands read(const Io& io) const {
    const Tensor x = io.input(0);
    expect_float(x, "x");
    const Shape shape = windows_.results(x.shape);
    Window w{{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}};
    for (size_t d = 0; d < windows_.space(); ++d) {
      const size_t at = kSpace - windows_.space() + d;
      w.size[at] = x.shape[d + 2];
      w.results[at] = shape[d + 2];
      w.kernel[at] = windows_.kernel(d);
      w.stride[at] = windows_.stride(d);
      w.dilation[at] = windows_.dilation(d);
      w.before[at] = windows_.over(d, x.shape[d + 2]).before;
    }
    return {x, output(io, 0, shape, x.type),
            outputs_ > 1 ? output(io, 1, shape, DType::kInt64) : Output{}, w};
  }
  void device(const Io& io, const Operands& o) const {
    const Shape& shape = o.y.shape;
    Queue queue(io, "standard.cu", o.x.type);
    queue.launch("max_pool", over(product(shape)), o.y.data, o.indices.data,
                 o.x.data, o.window, static_cast<Index>(product(shape, 0, 2)));
  }

 private:
  const PoolWindows windows_;
  const size_t outputs_;
};

Inferred pooled(const ShapeQuery& query) {
  SymbolicTensor x = query.input(0);
  if (x.shape.empty()) return std::nullopt;
  x.shape = PoolWindows(ShapeAttributes(query.context)).results(x.shape);
  for (size_t d = 2; d < x.shape.size(); ++d) x.names[d].clear();
  return x;
}

Operator unary(const char* name, const char* kernel, Real alpha = {}, Real gamma = {}) {
  return {name, {{}}, {port_like(like<0>)}, in_place<0>,
          fused<Elementwise>(kernel, alpha, gamma)};
}

}  // namespace

std::vector<Operator> standard_operators() {
  std::vector<Operator> all = {
      unary("Acos", "elementwise_acos"),
      unary("Acosh", "elementwise_acosh"),
      unary("Asin", "elementwise_asin"),
      unary("Asinh", "elementwise_asinh"),
      unary("Atan", "elementwise_atan"),
      unary("Atanh", "elementwise_atanh"),
      unary("Celu", "elementwise_celu", {"alpha", 1}),
      unary("Cosh", "elementwise_cosh"),
      unary("Elu", "elementwise_elu", {"alpha", 1}),
      unary("Selu", "elementwise_selu", {"alpha", 1.67326319217681884765625},
            {"gamma", 1.05070102214813232421875}),
      unary("Sinh", "elementwise_sinh"),
      unary("Tan", "elementwise_tan"),
      unary("ThresholdedRelu", "elementwise_thresholded_relu", {"alpha", 1}),
      {"MaxPool", {{}}, {port_like(pooled), {kInt64, ort::kOptional, pooled}}, never_in_place,
       fused<MaxPool>()},
  };
  for (Operator& of : all) {
    of.on_host = false;
    of.needs_gpu = true;
  }
  return all;
}

}  // namespace onnxpar
