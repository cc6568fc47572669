// Random numbers on a GPU.
#pragma once

#include "abi/ort_io.h"
#include "kernels/host/philox.h"

namespace onnxpar::cuda {

// Computes a node of Philox whose output is on the GPU and whose inputs are on the host: the same
// numbers as philox_fill, to the bit. Throws std::invalid_argument for wrong inputs.
void philox(const Io& io, Distribution distribution);

}  // namespace onnxpar::cuda
