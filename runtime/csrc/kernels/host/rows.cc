#include "kernels/rows.h"

#include <algorithm>
#include <optional>

namespace onnxpar {

void SoftmaxGrad::host(const Io& io, const Operands& o) const {
  const size_t n = o.n;
  const size_t inner = o.inner;
  with_real(o.dy, "dy", [&](auto zero) {
    using T = decltype(zero);
    const Reader<T> from(o.dy, "dy");
    const Reader<T> result(o.y, "y");
    Writer<T> dx(o.dx);
    if (n * inner == 0) return;
    if (inner == 1) {
      const auto loop = rule_.rows.of<T>();
      pieces(io, o.outer, std::max<size_t>(1, kPiece / n), [&](size_t begin, size_t rows) {
        for (size_t row = begin; row < begin + rows; ++row) {
          loop(dx.data() + row * n, from.data() + row * n, result.data() + row * n, n);
        }
      });
    } else {
      const auto loop = rule_.columns.of<T>();
      const size_t blocks = (inner + kColumns - 1) / kColumns;
      pieces(io, o.outer * blocks, 1, [&](size_t index, size_t) {
        const size_t column = index % blocks * kColumns;
        const size_t start = index / blocks * n * inner + column;
        loop(dx.data() + start, from.data() + start, result.data() + start, n, inner,
             std::min(kColumns, inner - column));
      });
    }
    dx.finish();
  });
}

void NormGrad::host(const Io& io, const Operands& o) const {
  const size_t rows = o.rows;
  const size_t n = o.n;
  with_real(o.x, "x", [&](auto zero) {
    using T = decltype(zero);
    const Reader<T> from(o.dy, "dy");
    const Reader<T> at_x(o.x, "x");
    const Reader<T> factor(o.scale, "scale");
    const Reader<T> inverse(o.inv_std, "inv_std");
    std::optional<Reader<T>> means;
    if (rule_.centred) means.emplace(o.mean, "mean");
    Writer<T> dx(o.dx);
    // Each block of rows sums for itself, and the blocks are added in order.
    constexpr size_t kBlocks = 64;
    const size_t block =
        std::max({size_t{1}, kPiece / std::max<size_t>(n, 1), (rows + kBlocks - 1) / kBlocks});
    const size_t blocks = (rows + block - 1) / block;
    const size_t width = (rule_.centred ? 2 : 1) * n;
    std::vector<T> sums(width * std::max<size_t>(blocks, 1));
    const auto loop = rule_.row.of<T>();
    pieces(io, rows, block, [&](size_t begin, size_t count) {
      T* dscale = sums.data() + begin / block * width;
      for (size_t row = begin; row < begin + count; ++row) {
        const size_t start = row * n;
        loop(dx.data() + start, dscale, dscale + n, from.data() + start, at_x.data() + start,
             factor.data(), means ? means->data()[row] : T(0), inverse.data()[row], n);
      }
    });
    dx.finish();
    const auto add = simd().of<T>().add;
    for (size_t i = 1; i < blocks; ++i) add(sums.data(), sums.data() + i * width, width);
    for (size_t i = 0; i < 2; ++i) {
      if (o.sums[i].data == nullptr) continue;
      Writer<T> out(o.sums[i]);
      std::copy_n(sums.data() + i * n, n, out.data());
      out.finish();
    }
  });
}

}  // namespace onnxpar
