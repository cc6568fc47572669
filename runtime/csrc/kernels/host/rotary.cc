#include "kernels/rotary.h"

#include <algorithm>

namespace onnxpar {

void Rotary::host(const Io& io, const Operands& o) const {
  if (o.x.count() == 0) return;
  with_real(o.x, "x", [&](auto zero) {
    using T = decltype(zero);
    const Reader<T> x(o.x, "x");
    const Reader<T> cos(o.cos, "cos");
    const Reader<T> sin(o.sin, "sin");
    Writer<T> y(o.y);
    const auto loop = rule_.row.of<T>();
    const size_t width = 2 * o.half;
    pieces(io, o.rows, std::max<size_t>(1, kPiece / width), [&](size_t begin, size_t count) {
      for (size_t row = begin; row < begin + count; ++row) {
        const auto angle = static_cast<size_t>(o.angles.of(static_cast<cuda::Index>(row)));
        loop(y.data() + row * width, x.data() + row * width, cos.data() + angle,
             sin.data() + angle, o.half);
      }
    });
    y.finish();
  });
}

}  // namespace onnxpar
