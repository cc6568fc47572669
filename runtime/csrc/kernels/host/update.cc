#include "kernels/update.h"

#include <cstring>

namespace onnxpar {
namespace {

using namespace cuda;

template <class T>
StepScalars<T> rounded(const Scalars& scalars) {
  const auto value = [&](Scalar which, double otherwise) {
    return scalars.of[which] == nullptr ? otherwise : *scalars.of[which];
  };
  double keep1 = value(kKeep1, 0);
  double take1 = value(kTake1, 0);
  if (scalars.of[kDampening] != nullptr) {
    const bool first = value(kFirst, 0) != 0;
    keep1 = first ? 0 : keep1;
    take1 = first ? 1 : 1 - value(kDampening, 0);
  }
  const auto to = [](double one) { return static_cast<T>(one); };
  // lr m / (sqrt(v) / c + eps) is c lr m / (sqrt(v) + c eps), which saves a division of each element.
  const double correction2 = value(kCorrection2, 1);
  return {to(value(kScale, 1)),
          to(value(kLearning, 0) * correction2),
          to(value(kWeightDecay, 0)),
          to(value(kDecay, 1)),
          to(keep1),
          to(take1),
          to(value(kKeep2, 0)),
          to(value(kTake2, 0)),
          to(value(kEps, 0) * correction2)};
}

}  // namespace

void Step::host(const Io& io, const Operands& o) const {
  if (const double* active = o.scalars.of[kActive]; active != nullptr && *active == 0) {
    for (size_t i = 0; i < o.to.size(); ++i) {
      const Tensor& from = o.from[i == 0 ? 0 : i + 1];
      if (o.to[i].data != from.data) std::memcpy(o.to[i].data, from.data, from.bytes());
    }
    return;
  }
  with_real(o.from[0], "p", [&](auto zero) {
    using T = decltype(zero);
    std::vector<Reader<T>> from;
    from.reserve(o.from.size());
    for (const Tensor& tensor : o.from) from.emplace_back(tensor, "p");
    std::vector<Writer<T>> to;
    to.reserve(o.to.size());
    for (const Output& output : o.to) to.emplace_back(output);
    const StepScalars<T> scalars = rounded<T>(o.scalars);
    const auto loop = rule_.loop.of<T>();
    pieces(io, o.from[0].count(), kPiece, [&](size_t begin, size_t n) {
      const T* read_at[4];
      T* write_at[3];
      for (size_t i = 0; i < from.size(); ++i) read_at[i] = from[i].data() + begin;
      for (size_t i = 0; i < to.size(); ++i) write_at[i] = to[i].data() + begin;
      loop(write_at, read_at, scalars, n);
    });
    for (Writer<T>& writer : to) writer.finish();
  });
}

}  // namespace onnxpar
