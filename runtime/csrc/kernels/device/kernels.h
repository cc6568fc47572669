// The operators of kernels.h for tensors on a GPU. Each takes the attributes that its twin on the
// host takes and checks the same of its inputs; see there for what it computes.
//
// What depends on values cannot be an error of the call, since nobody waits for the device: a label
// or an index that is out of range makes the loss no number, adds nothing to a gradient, and is an
// error of the node's next call. Scalars of optimizer steps are read on the device.
#pragma once

#include "kernels/io.h"

namespace onnxpar::cuda {

Compute relu_grad(const KernelAttributes&, size_t);
Compute tanh_grad(const KernelAttributes&, size_t);
Compute sigmoid_grad(const KernelAttributes&, size_t);
Compute gelu_grad(const KernelAttributes&, size_t);
Compute square_sum(const KernelAttributes&, size_t);
Compute softmax_grad(const KernelAttributes&, size_t);
Compute log_softmax_grad(const KernelAttributes&, size_t);
Compute layer_norm_grad(const KernelAttributes&, size_t outputs);
Compute loss(const KernelAttributes&, size_t outputs);
Compute loss_grad(const KernelAttributes&, size_t);
Compute gather_grad(const KernelAttributes&, size_t);
Compute sgd_step(const KernelAttributes&, size_t);
Compute momentum_step(const KernelAttributes&, size_t);
Compute adam_step(const KernelAttributes&, size_t);
Compute adamw_step(const KernelAttributes&, size_t);

}  // namespace onnxpar::cuda
