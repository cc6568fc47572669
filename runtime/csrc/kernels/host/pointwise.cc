#include "kernels/pointwise.h"

namespace onnxpar {

void Pointwise::host(const Io& io, const Operands& o) const {
  with_real(o.x, rule_.first, [&](auto zero) {
    using T = decltype(zero);
    const Reader<T> x(o.x, rule_.first);
    const Reader<T> other(o.other, rule_.other);
    Writer<T> y(o.y);
    const auto loop = rule_.loop.of<T>();
    pieces(io, o.x.count(), kPiece, [&](size_t begin, size_t n) {
      loop(y.data() + begin, x.data() + begin, other.data() + begin, n);
    });
    y.finish();
  });
}

void GatedGrad::host(const Io& io, const Operands& o) const {
  with_real(o.dy, "dy", [&](auto zero) {
    using T = decltype(zero);
    const Reader<T> from(o.dy, "dy");
    const Reader<T> gate(o.gate, "gate");
    const Reader<T> up(o.up, "up");
    Writer<T> dgate(o.dgate);
    Writer<T> dup(o.dup);
    const auto loop = rule_.loop.of<T>();
    pieces(io, o.dy.count(), kPiece, [&](size_t begin, size_t n) {
      loop(dgate.data() + begin, dup.data() + begin, from.data() + begin, gate.data() + begin,
           up.data() + begin, n);
    });
    dgate.finish();
    dup.finish();
  });
}

void SquareSum::host(const Io& io, const Operands& o) const {
  with_real(o.inputs[0], "x", [&](auto zero) {
    using T = decltype(zero);
    const auto loop = simd().of<T>().square_sum;
    double total = 0;
    for (const Tensor& x : o.inputs) {
      const Reader<T> from(x, "x");
      const size_t count = x.count();
      std::vector<double> sums((count + kPiece - 1) / kPiece);
      pieces(io, count, kPiece, [&](size_t begin, size_t n) {
        sums[begin / kPiece] = loop(from.data() + begin, n);
      });
      double sum = 0;
      for (double part : sums) sum += part;
      total += sum;
    }
    *static_cast<T*>(o.sum) = static_cast<T>(total);
  });
}

}  // namespace onnxpar
