// Steps of optimizers: a parameter and its moments in one pass over memory.
#include "kernels/checks.h"
#include "kernels/device/kernels.h"

namespace onnxpar {
namespace {

// The scalars that follow a step's tensors, read one after the other.
class Scalars {
 public:
  Scalars(const Io& io, size_t first) : io_(io), next_(first), inputs_(io.inputs()) {}
  double next(const char* name) { return scalar(io_.input(next_++), name); }
  double next(const char* name, double otherwise) {
    return next_ < inputs_ ? next(name) : otherwise;
  }

 private:
  const Io& io_;
  size_t next_;
  const size_t inputs_;
};

using Wide = StepScalars<double>;

template <class T>
StepScalars<T> rounded(const Wide& s) {
  const auto to = [](double value) { return static_cast<T>(value); };
  return {to(s.scale), to(s.learning), to(s.weight_decay), to(s.decay),       to(s.keep1),
          to(s.take1), to(s.keep2),    to(s.take2),        to(s.correction2), to(s.eps)};
}

Wide neutral() { return {1, 0, 0, 1, 0, 0, 0, 0, 1, 0}; }

// Runs loop(outputs, inputs, scalars, n) over all elements of p; the tensors are p, g and the
// moments, of which all but g are written.
template <size_t kTensors, class Select>
void step(const Io& io, const Wide& wide, Select select) {
  const std::vector<Tensor> tensors = step_inputs(io, kTensors);
  const Tensor& p = tensors[0];
  with_real(p, "p", [&](auto zero) {
    using T = decltype(zero);
    std::vector<Reader<T>> from;
    from.reserve(kTensors);
    for (const Tensor& tensor : tensors) from.emplace_back(tensor, "p");
    std::vector<Writer<T>> to;
    to.reserve(kTensors - 1);
    for (size_t i = 0; i + 1 < kTensors; ++i) to.emplace_back(io, i, p.shape, p.type);
    const StepScalars<T> scalars = rounded<T>(wide);
    const auto loop = select(simd().of<T>());
    pieces(io, p.count(), kPiece, [&](size_t b, size_t n) {
      if constexpr (kTensors == 2) {
        loop(to[0].data() + b, from[0].data() + b, from[1].data() + b, scalars, n);
      } else if constexpr (kTensors == 3) {
        loop(to[0].data() + b, to[1].data() + b, from[0].data() + b, from[1].data() + b,
             from[2].data() + b, scalars, n);
      } else {
        loop(to[0].data() + b, to[1].data() + b, to[2].data() + b, from[0].data() + b,
             from[1].data() + b, from[2].data() + b, from[3].data() + b, scalars, n);
      }
    });
    for (Writer<T>& writer : to) writer.finish();
  });
}

Compute sgd_step(const Attributes&, size_t) {
  return [](const Io& io) {
    Scalars scalars(io, 2);
    Wide s = neutral();
    s.scale = scalars.next("scale");
    s.learning = scalars.next("lr");
    s.weight_decay = scalars.next("weight_decay", 0);
    step<2>(io, s, [](const auto& loops) { return loops.sgd; });
  };
}

Compute momentum_step(const Attributes&, size_t) {
  return [](const Io& io) {
    Scalars scalars(io, 3);
    Wide s = neutral();
    s.scale = scalars.next("scale");
    s.learning = scalars.next("lr");
    s.keep1 = scalars.next("momentum");
    s.take1 = 1 - scalars.next("dampening");
    if (scalars.next("first") != 0) {
      s.keep1 = 0;
      s.take1 = 1;
    }
    s.weight_decay = scalars.next("weight_decay", 0);
    step<3>(io, s, [](const auto& loops) { return loops.momentum; });
  };
}

void adam(const Io& io, bool decoupled) {
  Scalars scalars(io, 4);
  Wide s = neutral();
  s.scale = scalars.next("scale");
  s.learning = scalars.next("lr_corrected");
  s.keep1 = scalars.next("beta1");
  s.take1 = scalars.next("beta1_complement");
  s.keep2 = scalars.next("beta2");
  s.take2 = scalars.next("beta2_complement");
  s.eps = scalars.next("eps");
  s.correction2 = scalars.next("correction2_sqrt");
  if (decoupled) s.decay = scalars.next("decay", 1);
  else s.weight_decay = scalars.next("weight_decay", 0);
  step<4>(io, s, [](const auto& loops) { return loops.adam; });
}

Compute adam_step(const Attributes&, size_t) {
  return [](const Io& io) { adam(io, false); };
}

Compute adamw_step(const Attributes&, size_t) {
  return [](const Io& io) { adam(io, true); };
}

}  // namespace

const std::vector<KernelSpec>& update_kernels() {
  // p, g and the moments, then scalars.
  const auto inputs = [](size_t tensors, size_t scalars) {
    std::vector<int> types(tensors, kAny);
    types.resize(tensors + scalars, kDouble);
    return types;
  };
  static const std::vector<KernelSpec> all = {
      {"SgdStep", inputs(2, 3), 1, false, {{0}}, false, in_place<0>, sgd_step, cuda::sgd_step},
      {"MomentumStep",
       inputs(3, 6),
       1,
       false,
       {{0}, {2}},
       false,
       in_place<0, 2>,
       momentum_step,
       cuda::momentum_step},
      {"AdamStep",
       inputs(4, 9),
       1,
       false,
       {{0}, {2}, {3}},
       false,
       in_place<0, 2, 3>,
       adam_step,
       cuda::adam_step},
      {"AdamWStep",
       inputs(4, 9),
       1,
       false,
       {{0}, {2}, {3}},
       false,
       in_place<0, 2, 3>,
       adamw_step,
       cuda::adamw_step},
  };
  return all;
}

}  // namespace onnxpar
