// Steps of optimizers, on a GPU: one launch for each parameter.
#include "kernels/checks.h"
#include "kernels/device/kernels.h"
#include "kernels/device/queue.h"

namespace onnxpar::cuda {
namespace {

// As in device/update.cu.
struct Scalars {
  const void* scale = nullptr;
  const void* learning = nullptr;
  const void* weight_decay = nullptr;
  const void* decay = nullptr;
  const void* keep1 = nullptr;
  const void* take1 = nullptr;
  const void* keep2 = nullptr;
  const void* take2 = nullptr;
  const void* correction2 = nullptr;
  const void* eps = nullptr;
  const void* dampening = nullptr;
  const void* first = nullptr;
};

// An operator's tensors: the gradient, and p and its moments, which are read and written.
struct Tensors {
  const void* gradient = nullptr;
  const void* from[3] = {};
  void* to[3] = {};
};

// A scalar of the operator: what it is called, and which it is of the kernel's.
struct Scalar {
  const char* name;
  const void* Scalars::*of;
};

// The scalars that follow the tensors, in order; the last may be left out.
Scalars read(const Io& io, size_t first, const std::vector<Scalar>& names) {
  Scalars scalars;
  const size_t inputs = io.inputs();
  for (size_t i = 0; i < names.size() && first + i < inputs; ++i) {
    const Tensor scalar = io.input(first + i);
    expect_type(scalar, names[i].name, DType::kFloat64);
    expect_one(scalar, names[i].name);
    scalars.*names[i].of = scalar.data;
  }
  return scalars;
}

// The step of an operator with p, g and `moments` moments.
Compute step(const char* kernel, size_t moments, std::vector<Scalar> names) {
  return [=](const Io& io) {
    const std::vector<Tensor> x = step_inputs(io, 2 + moments);
    const Scalars scalars = read(io, x.size(), names);
    Queue queue(io, "update.cu", x[0].type);
    Tensors at;
    at.gradient = x[1].data;
    for (size_t i = 0; i <= moments; ++i) {
      at.from[i] = x[i == 0 ? 0 : i + 1].data;
      at.to[i] = io.output(i, x[0].shape);
    }
    const size_t count = x[0].count();
    queue.launch(kernel, over(count, pack(x[0].type)), at, static_cast<Index>(count), scalars);
  };
}

Compute adam(Scalar last) {
  const std::vector<Scalar> names = {{"scale", &Scalars::scale},
                                     {"lr_corrected", &Scalars::learning},
                                     {"beta1", &Scalars::keep1},
                                     {"beta1_complement", &Scalars::take1},
                                     {"beta2", &Scalars::keep2},
                                     {"beta2_complement", &Scalars::take2},
                                     {"eps", &Scalars::eps},
                                     {"correction2_sqrt", &Scalars::correction2},
                                     last};
  return step("adam_step", 2, names);
}

}  // namespace

Compute sgd_step(const KernelAttributes&, size_t) {
  return step("sgd_step", 0,
              {{"scale", &Scalars::scale},
               {"lr", &Scalars::learning},
               {"weight_decay", &Scalars::weight_decay}});
}

Compute momentum_step(const KernelAttributes&, size_t) {
  return step("momentum_step", 1,
              {{"scale", &Scalars::scale},
               {"lr", &Scalars::learning},
               {"momentum", &Scalars::keep1},
               {"dampening", &Scalars::dampening},
               {"first", &Scalars::first},
               {"weight_decay", &Scalars::weight_decay}});
}

Compute adam_step(const KernelAttributes&, size_t) {
  return adam({"weight_decay", &Scalars::weight_decay});
}
Compute adamw_step(const KernelAttributes&, size_t) { return adam({"decay", &Scalars::decay}); }

}  // namespace onnxpar::cuda
