// Gradients of activations and the sum of squares, on a GPU.
#include "kernels/checks.h"
#include "kernels/device/kernels.h"
#include "kernels/device/queue.h"

namespace onnxpar::cuda {
namespace {

Compute pointwise(const char* other, const char* kernel) {
  return [=](const Io& io) {
    const Pointwise inputs = pointwise_inputs(io, other);
    const DType type = inputs.dy.type;
    const size_t count = inputs.dy.count();
    Queue queue(io, "pointwise.cu", type);
    void* dx = io.output(0, inputs.dy.shape);
    queue.launch(kernel, over(count, pack(type)), dx, inputs.dy.data, inputs.y.data,
                 static_cast<Index>(count));
  };
}

// As in device/square_sum.cu.
constexpr size_t kTensors = 64;
constexpr size_t kSquares = 16384;
struct Tensors {
  const void* data[kTensors] = {};
  Index count[kTensors] = {};
  Index first[kTensors + 1] = {};
};

}  // namespace

Compute relu_grad(const KernelAttributes&, size_t) { return pointwise("y", "relu_grad"); }
Compute tanh_grad(const KernelAttributes&, size_t) { return pointwise("y", "tanh_grad"); }
Compute sigmoid_grad(const KernelAttributes&, size_t) { return pointwise("y", "sigmoid_grad"); }
Compute gelu_grad(const KernelAttributes& attributes, size_t) {
  return pointwise("x", gelu_is_tanh(attributes) ? "gelu_tanh_grad" : "gelu_grad");
}

Compute square_sum(const KernelAttributes&, size_t) {
  return [](const Io& io) {
    std::vector<Tensor> inputs;
    size_t pieces = 0;
    const size_t given = io.inputs();
    for (size_t i = 0; i < given; ++i) {
      const Tensor x = io.input(i);
      if (i == 0) expect_float(x, "x");
      else expect_type(x, "an input", inputs[0].type);
      pieces += (x.count() + kSquares - 1) / kSquares;
      inputs.push_back(x);
    }
    Queue queue(io, "square_sum.cu", inputs[0].type);
    double* parts = queue.scratch<double>(pieces);
    size_t done = 0;
    for (size_t begin = 0; begin < inputs.size(); begin += kTensors) {
      Tensors tensors;
      for (size_t i = 0; i < kTensors; ++i) {
        const bool there = begin + i < inputs.size();
        const size_t count = there ? inputs[begin + i].count() : 0;
        if (there) tensors.data[i] = inputs[begin + i].data;
        tensors.count[i] = static_cast<Index>(count);
        tensors.first[i + 1] =
            tensors.first[i] + static_cast<Index>((count + kSquares - 1) / kSquares);
      }
      const auto blocks = static_cast<size_t>(tensors.first[kTensors]);
      queue.launch("square_sum_pieces", {blocks}, parts + done, tensors);
      done += blocks;
    }
    queue.launch("square_sum_total", {1}, io.output(0, {}), parts, static_cast<Index>(pieces));
  };
}

}  // namespace onnxpar::cuda
