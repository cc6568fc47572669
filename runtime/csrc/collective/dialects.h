// The collectives of other runtimes, so that graphs for them can be run here.
#pragma once

#include <vector>

#include "abi/operator.h"

namespace onnxpar {

// TensorRT's DistCollective, in ONNX's own domain.
const std::vector<Operator>& tensorrt_operators();
// AllReduce, AllGather and AllToAll of the domain com.microsoft, with one group of all ranks.
const std::vector<Operator>& microsoft_operators();

}  // namespace onnxpar
