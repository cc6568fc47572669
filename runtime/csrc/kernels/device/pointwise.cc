#include "kernels/pointwise.h"

#include "kernels/device/queue.h"
#include "kernels/device/square_sum.cuh"

namespace onnxpar {

using namespace cuda;

void Pointwise::device(const Io& io, const Operands& o) const {
  const size_t count = o.x.count();
  Queue queue(io, "pointwise.cu", o.x.type);
  queue.launch(rule_.kernel, over(count, pack(o.x.type)), o.y.data, o.x.data, o.other.data,
               static_cast<Index>(count));
}

void GatedGrad::device(const Io& io, const Operands& o) const {
  const size_t count = o.dy.count();
  Queue queue(io, "pointwise.cu", o.dy.type);
  queue.launch(rule_.kernel, over(count, pack(o.dy.type)), o.dgate.data, o.dup.data, o.dy.data,
               o.gate.data, o.up.data, static_cast<Index>(count));
}

void SquareSum::device(const Io& io, const Operands& o) const {
  const auto pieces_of = [](size_t count) {
    return (static_cast<Index>(count) + kSquares - 1) / kSquares;
  };
  Index pieces = 0;
  for (const Tensor& x : o.inputs) pieces += pieces_of(x.count());
  Queue queue(io, "square_sum.cu", o.inputs[0].type);
  double* parts = queue.scratch<double>(static_cast<size_t>(pieces));
  Index done = 0;
  for (size_t begin = 0; begin < o.inputs.size(); begin += kTensors) {
    SquaredTensors tensors{};
    for (size_t i = 0; i < kTensors; ++i) {
      const bool there = begin + i < o.inputs.size();
      const size_t count = there ? o.inputs[begin + i].count() : 0;
      if (there) tensors.data[i] = o.inputs[begin + i].data;
      tensors.count[i] = static_cast<Index>(count);
      tensors.first[i + 1] = tensors.first[i] + pieces_of(count);
    }
    const Index blocks = tensors.first[kTensors];
    queue.launch("square_sum_pieces", {static_cast<size_t>(blocks)}, parts + done, tensors);
    done += blocks;
  }
  queue.launch("square_sum_total", {1}, o.sum, parts, pieces);
}

}  // namespace onnxpar
