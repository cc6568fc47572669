// Steps of optimizers, on a GPU: one launch for each parameter.
#include "cuda_kernels.h"
#include "cuda_queue.h"
#include "kernels_checks.h"

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

Compute sgd(std::vector<Scalar> names) {
  return [=](const Io& io) {
    const std::vector<Tensor> x = step_inputs(io, 2);
    const Scalars scalars = read(io, 2, names);
    Queue queue(io, "update.cu", x[0].type);
    const size_t count = x[0].count();
    queue.launch("sgd_step", over(count, pack(x[0].type)), io.output(0, x[0].shape), x[0].data,
                 x[1].data, static_cast<Index>(count), scalars);
  };
}

Compute momentum(std::vector<Scalar> names) {
  return [=](const Io& io) {
    const std::vector<Tensor> x = step_inputs(io, 3);
    const Scalars scalars = read(io, 3, names);
    Queue queue(io, "update.cu", x[0].type);
    const size_t count = x[0].count();
    void* p = io.output(0, x[0].shape);
    void* m = io.output(1, x[0].shape);
    queue.launch("momentum_step", over(count, pack(x[0].type)), p, m, x[0].data, x[1].data,
                 x[2].data, static_cast<Index>(count), scalars);
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
  return [=](const Io& io) {
    const std::vector<Tensor> x = step_inputs(io, 4);
    const Scalars scalars = read(io, 4, names);
    Queue queue(io, "update.cu", x[0].type);
    const size_t count = x[0].count();
    void* p = io.output(0, x[0].shape);
    void* m = io.output(1, x[0].shape);
    void* v = io.output(2, x[0].shape);
    queue.launch("adam_step", over(count, pack(x[0].type)), p, m, v, x[0].data, x[1].data,
                 x[2].data, x[3].data, static_cast<Index>(count), scalars);
  };
}

}  // namespace

Compute sgd_step(const KernelAttributes&, size_t) {
  return sgd({{"scale", &Scalars::scale},
              {"lr", &Scalars::learning},
              {"weight_decay", &Scalars::weight_decay}});
}

Compute momentum_step(const KernelAttributes&, size_t) {
  return momentum({{"scale", &Scalars::scale},
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
