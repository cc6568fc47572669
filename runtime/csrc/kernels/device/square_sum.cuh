// Parameters of the sum of squares.
#pragma once

#include "types.cuh"

namespace onnxpar::cuda {

constexpr int kTensors = 64;      // of one launch
constexpr Index kSquares = 16384;  // elements that one block adds up

struct SquaredTensors {
  const Element* data[kTensors];
  Index count[kTensors];
  Index first[kTensors + 1];  // the block that each begins with, and the end
};

}  // namespace onnxpar::cuda
