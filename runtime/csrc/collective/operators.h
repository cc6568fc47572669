// The collectives as operators.
#pragma once

#include <vector>

#include "abi/operator.h"

namespace onnxpar {

const std::vector<Operator>& collective_operators();

}  // namespace onnxpar
