// Gradients of what normalises rows: softmax, its logarithm and layer normalisation.
#include <algorithm>

#include "kernels/checks.h"
#include "kernels/device/kernels.h"

namespace onnxpar {
namespace {

template <class SelectRow, class SelectColumns>
Compute softmax(int64_t axis, SelectRow select_row, SelectColumns select_columns) {
  return [=](const Io& io) {
    const Softmax inputs = softmax_inputs(io, axis);
    const size_t outer = inputs.outer;
    const size_t n = inputs.n;
    const size_t inner = inputs.inner;
    with_real(inputs.dy, "dy", [&](auto zero) {
      using T = decltype(zero);
      const Reader<T> from(inputs.dy, "dy");
      const Reader<T> result(inputs.y, "y");
      Writer<T> dx(io, 0, inputs.dy.shape, inputs.dy.type);
      if (n * inner == 0) return;
      if (inner == 1) {
        const auto loop = select_row(simd().of<T>());
        pieces(io, outer, std::max<size_t>(1, kPiece / n), [&](size_t begin, size_t rows) {
          for (size_t row = begin; row < begin + rows; ++row) {
            loop(dx.data() + row * n, from.data() + row * n, result.data() + row * n, n);
          }
        });
      } else {
        const auto loop = select_columns(simd().of<T>());
        const size_t blocks = (inner + kColumns - 1) / kColumns;
        pieces(io, outer * blocks, 1, [&](size_t index, size_t) {
          const size_t column = index % blocks * kColumns;
          const size_t start = index / blocks * n * inner + column;
          loop(dx.data() + start, from.data() + start, result.data() + start, n, inner,
               std::min(kColumns, inner - column));
        });
      }
      dx.finish();
    });
  };
}

Compute softmax_grad(const Attributes& attributes, size_t) {
  return softmax(
      attributes.integer("axis").value_or(-1),
      [](const auto& loops) { return loops.softmax_grad; },
      [](const auto& loops) { return loops.softmax_grad_columns; });
}

Compute log_softmax_grad(const Attributes& attributes, size_t) {
  return softmax(
      attributes.integer("axis").value_or(-1),
      [](const auto& loops) { return loops.log_softmax_grad; },
      [](const auto& loops) { return loops.log_softmax_grad_columns; });
}

Compute layer_norm_grad(const Attributes& attributes, size_t outputs) {
  const int64_t axis = attributes.integer("axis").value_or(-1);
  return [=](const Io& io) {
    const LayerNorm inputs = layer_norm_inputs(io, axis);
    const size_t rows = inputs.rows;
    const size_t n = inputs.n;
    with_real(inputs.x, "x", [&](auto zero) {
      using T = decltype(zero);
      const Reader<T> from(inputs.dy, "dy");
      const Reader<T> at_x(inputs.x, "x");
      const Reader<T> factor(inputs.scale, "scale");
      const Reader<T> means(inputs.mean, "mean");
      const Reader<T> inverse(inputs.inv_std, "inv_std");
      Writer<T> dx(io, 0, inputs.x.shape, inputs.x.type);
      // Each block of rows sums for itself, and the blocks are added in order.
      constexpr size_t kBlocks = 64;
      const size_t block =
          std::max({size_t{1}, kPiece / std::max<size_t>(n, 1), (rows + kBlocks - 1) / kBlocks});
      const size_t blocks = (rows + block - 1) / block;
      std::vector<T> sums(2 * n * std::max<size_t>(blocks, 1));
      const auto& loops = simd().of<T>();
      pieces(io, rows, block, [&](size_t begin, size_t count) {
        T* dscale = sums.data() + begin / block * 2 * n;
        for (size_t row = begin; row < begin + count; ++row) {
          const size_t start = row * n;
          loops.layer_norm_grad(dx.data() + start, dscale, dscale + n, from.data() + start,
                                at_x.data() + start, factor.data(), means.data()[row],
                                inverse.data()[row], n);
        }
      });
      dx.finish();
      for (size_t i = 1; i < blocks; ++i) loops.add(sums.data(), sums.data() + i * 2 * n, 2 * n);
      for (size_t output = 1; output < outputs; ++output) {
        Writer<T> out(io, output, inputs.scale.shape, inputs.scale.type);
        if (out.data() == nullptr) continue;
        std::copy_n(sums.data() + (output - 1) * n, n, out.data());
        out.finish();
      }
    });
  };
}

}  // namespace

const std::vector<KernelSpec>& row_kernels() {
  static const std::vector<KernelSpec> all = {
      {"SoftmaxGrad",
       {kAny, kAny},
       0,
       false,
       {{0}},
       false,
       in_place<0>,
       softmax_grad,
       cuda::softmax_grad},
      {"LogSoftmaxGrad",
       {kAny, kAny},
       0,
       false,
       {{0}},
       false,
       in_place<0>,
       log_softmax_grad,
       cuda::log_softmax_grad},
      {"LayerNormalizationGrad",
       {kAny, kAny, kAny, kAny, kAny},
       0,
       false,
       {{1}, {2}, {2}},
       true,
       in_place<0>,
       layer_norm_grad,
       cuda::layer_norm_grad},
  };
  return all;
}

}  // namespace onnxpar
