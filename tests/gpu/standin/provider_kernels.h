// Kernels of onnxruntime's CUDA provider that are emulated: what it computes element by
// element, and softmax of short rows.
#pragma once
#include "streams.h"

namespace standin {

// The work of a kernel, of its mangled name and arguments, which are read at once; null for one that
// is not emulated.
Work provider_kernel(const char* name, void** arguments);

}  // namespace standin
