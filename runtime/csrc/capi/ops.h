// The operators of the domain `onnxpar`, as onnxruntime kernels.
#pragma once

#include "abi/ort_abi.h"
#include "collective/world.h"

namespace onnxpar {

// Adds the domain to the options. The kernels of sessions made with them act as `rank`; without
// one the graph can be loaded for inspection but no kernel of a collective can be made. `dialects`: also
// adds the collectives of other runtimes.
ort::Status* register_ops(ort::SessionOptions* options, RankContext* rank, bool dialects);

}  // namespace onnxpar
