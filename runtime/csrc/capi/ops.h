// The operators of the domain `onnxpar`, as onnxruntime kernels.
#pragma once

#include <string>

#include "abi/ort_abi.h"
#include "collective/world.h"

namespace onnxpar {

// The other runtime whose collectives sessions have that the calling thread makes; empty for none.
inline thread_local std::string t_dialect;

// Adds the domain to the options. The kernels of sessions made with them act as `rank`; without
// one the graph can be loaded for inspection but no kernel of a collective can be made. Also adds
// the collectives of another runtime, "tensorrt" or "onnxruntime", unless `dialect` is empty.
ort::Status* register_ops(ort::SessionOptions* options, RankContext* rank,
                          const std::string& dialect);

}  // namespace onnxpar
