// Standard operators that onnxruntime's CUDA provider lacks: on a GPU alone. Sessions of ranks
// without one expand the function that a graph carries, to the standard operator.
#include "kernels/checks.h"
#include "kernels/device/queue.h"
#include "kernels/pool.h"

namespace onnxpar {
namespace cuda {
namespace {

Compute elementwise(const char* kernel, double alpha = 0, double gamma = 0) {
  return [=](const Io& io) {
    const Tensor x = io.input(0);
    expect_float(x, "x");
    const size_t count = x.count();
    Queue queue(io, "standard.cu", x.type);
    queue.launch(kernel, over(count, pack(x.type)), io.output(0, x.shape), x.data,
                 static_cast<Index>(count), alpha, gamma);
  };
}

// As in device/standard.cu.
constexpr size_t kSpace = 3;
struct Window {
  Index size[kSpace] = {1, 1, 1};
  Index results[kSpace] = {1, 1, 1};
  Index kernel[kSpace] = {1, 1, 1};
  Index stride[kSpace] = {1, 1, 1};
  Index dilation[kSpace] = {1, 1, 1};
  Index before[kSpace] = {0, 0, 0};
};

Compute max_pool(const KernelAttributes& attributes, size_t outputs) {
  const PoolWindows windows(attributes);
  if (windows.space() > kSpace) {
    throw std::invalid_argument("kernel_shape has " + std::to_string(windows.space()) +
                                " dims, expected at most 3");
  }
  return [=](const Io& io) {
    const Tensor x = io.input(0);
    expect_float(x, "x");
    const Shape shape = windows.results(x.shape);
    Window w;
    for (size_t d = 0; d < windows.space(); ++d) {
      const size_t at = kSpace - windows.space() + d;
      w.size[at] = x.shape[d + 2];
      w.results[at] = shape[d + 2];
      w.kernel[at] = windows.kernel(d);
      w.stride[at] = windows.stride(d);
      w.dilation[at] = windows.dilation(d);
      w.before[at] = windows.over(d, x.shape[d + 2]).before;
    }
    void* y = io.output(0, shape);
    void* indices = outputs > 1 ? io.output(1, shape) : nullptr;
    Queue queue(io, "standard.cu", x.type);
    queue.launch("max_pool", over(product(shape, 0, shape.size())), y, indices, x.data, w,
                 static_cast<Index>(product(shape, 0, 2)));
  };
}

template <const char* kKernel>
Compute plain(const KernelAttributes&, size_t) {
  return elementwise(kKernel);
}

double real(const KernelAttributes& attributes, const char* name, double otherwise) {
  return attributes.real(name).value_or(otherwise);
}

Compute celu(const KernelAttributes& a, size_t) {
  return elementwise("elementwise_celu", real(a, "alpha", 1));
}
Compute elu(const KernelAttributes& a, size_t) {
  return elementwise("elementwise_elu", real(a, "alpha", 1));
}
Compute selu(const KernelAttributes& a, size_t) {
  return elementwise("elementwise_selu", real(a, "alpha", 1.67326319217681884765625),
                     real(a, "gamma", 1.05070102214813232421875));
}
Compute thresholded_relu(const KernelAttributes& a, size_t) {
  return elementwise("elementwise_thresholded_relu", real(a, "alpha", 1));
}

KernelSpec unary(const char* name, Compute (*make)(const KernelAttributes&, size_t)) {
  return {name, {kAny}, 0, false, {{0}}, false, in_place<0>, nullptr, make};
}

constexpr char kAcos[] = "elementwise_acos", kAcosh[] = "elementwise_acosh";
constexpr char kAsin[] = "elementwise_asin", kAsinh[] = "elementwise_asinh";
constexpr char kAtan[] = "elementwise_atan", kAtanh[] = "elementwise_atanh";
constexpr char kCosh[] = "elementwise_cosh", kSinh[] = "elementwise_sinh";
constexpr char kTan[] = "elementwise_tan";

}  // namespace
}  // namespace cuda

const std::vector<KernelSpec>& standard_kernels() {
  using namespace cuda;
  static const std::vector<KernelSpec> all = {
      unary("Acos", plain<kAcos>),
      unary("Acosh", plain<kAcosh>),
      unary("Asin", plain<kAsin>),
      unary("Asinh", plain<kAsinh>),
      unary("Atan", plain<kAtan>),
      unary("Atanh", plain<kAtanh>),
      unary("Celu", celu),
      unary("Cosh", plain<kCosh>),
      unary("Elu", elu),
      unary("Selu", selu),
      unary("Sinh", plain<kSinh>),
      unary("Tan", plain<kTan>),
      unary("ThresholdedRelu", thresholded_relu),
      {"MaxPool",
       {kAny},
       0,
       false,
       {{0, Like::Shape::kPooled}, {0, Like::Shape::kPooled, false, kInt64}},
       true,
       never_in_place,
       nullptr,
       max_pool},
  };
  return all;
}

}  // namespace onnxpar
