// Gradients of what normalises rows: softmax, its logarithm and layer normalisation.
#include <algorithm>

#include "kernels_io.h"

namespace onnxpar {
namespace {

template <class SelectRow, class SelectColumns>
Compute softmax(int64_t axis, SelectRow select_row, SelectColumns select_columns) {
  return [=](const Io& io) {
    const Tensor dy = io.input(0);
    const Tensor y = io.input(1);
    expect_like(y, "y", dy, "dy");
    const size_t at = axis_of(dy.shape, axis);
    const size_t outer = product(dy.shape, 0, at);
    const size_t n = static_cast<size_t>(dy.shape[at]);
    const size_t inner = product(dy.shape, at + 1, dy.shape.size());
    with_real(dy, "dy", [&](auto zero) {
      using T = decltype(zero);
      const Reader<T> from(dy, "dy");
      const Reader<T> result(y, "y");
      Writer<T> dx(io, 0, dy.shape, dy.type);
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
    const Tensor dy = io.input(0);
    const Tensor x = io.input(1);
    const Tensor scale = io.input(2);
    const Tensor mean = io.input(3);
    const Tensor inv_std = io.input(4);
    expect_like(dy, "dy", x, "x");
    expect_type(scale, "scale", x.type);
    const size_t at = axis_of(x.shape, axis);
    const size_t rows = product(x.shape, 0, at);
    const size_t n = product(x.shape, at, x.shape.size());
    expect_count(scale, "scale", n, "one for each in a row");
    expect_count(mean, "mean", rows, "one for each row");
    expect_count(inv_std, "inv_std", rows, "one for each row");
    with_real(x, "x", [&](auto zero) {
      using T = decltype(zero);
      const Reader<T> from(dy, "dy");
      const Reader<T> at_x(x, "x");
      const Reader<T> factor(scale, "scale");
      const Reader<T> means(mean, "mean");
      const Reader<T> inverse(inv_std, "inv_std");
      Writer<T> dx(io, 0, x.shape, x.type);
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
        Writer<T> out(io, output, scale.shape, scale.type);
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
      {"SoftmaxGrad", {kAny, kAny}, 0, false, {{0}}, false, in_place<0>, softmax_grad},
      {"LogSoftmaxGrad", {kAny, kAny}, 0, false, {{0}}, false, in_place<0>, log_softmax_grad},
      {"LayerNormalizationGrad",
       {kAny, kAny, kAny, kAny, kAny},
       0,
       false,
       {{1}, {2}, {2}},
       true,
       in_place<0>,
       layer_norm_grad},
  };
  return all;
}

}  // namespace onnxpar
