#include "kernels/accumulate.h"

#include <cstring>

#include "kernels/host/simd.h"

namespace onnxpar {
namespace {

// to += from, in the memory of `to`.
void add(const Io& io, const Tensor& to, const Tensor& from) {
  with_real(to, "a gradient", [&](auto zero) {
    using T = decltype(zero);
    const auto loop = simd().of<T>().add;
    constexpr DType kOwn = sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64;
    const Reader<T> more(from, "its sum");
    if (to.type == kOwn) {
      T* sum = static_cast<T*>(const_cast<void*>(to.data));
      pieces(io, to.count(), kPiece,
             [&](size_t begin, size_t n) { loop(sum + begin, more.data() + begin, n); });
      return;
    }
    const Reader<T> old(to, "a gradient");
    Writer<T> sum(Output{const_cast<void*>(to.data), to.type, to.shape});
    pieces(io, to.count(), kPiece, [&](size_t begin, size_t n) {
      std::memcpy(sum.data() + begin, old.data() + begin, n * sizeof(T));
      loop(sum.data() + begin, more.data() + begin, n);
    });
    sum.finish();
  });
}

}  // namespace

void Accumulate::host(const Io& io, const Operands& o) const {
  for (const auto& [gradient, sum] : o.pairs) {
    if (!o.later) add(io, gradient, sum);
    else if (o.earlier) add(io, sum, gradient);
    else std::memcpy(const_cast<void*>(sum.data), gradient.data, gradient.bytes());
  }
}

}  // namespace onnxpar
