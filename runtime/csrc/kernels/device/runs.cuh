// Parameters of random numbers.
#pragma once

#include "philox.cuh"
#include "types.cuh"

namespace onnxpar::cuda {

constexpr int kMaxDims = 12;

// A run is a row of elements that are neighbours in the global array too. The dims before it, the
// last first, have sizes in the block and strides in the global array.
struct Runs {
  philox::Words state;
  Index count;   // of runs
  Index length;  // of a run
  Index blocks;  // the most blocks of four numbers that a run meets
  Index first;   // where in the global array the block's first element lies
  int dims;
  bool normal;
  Index sizes[kMaxDims];
  Index strides[kMaxDims];
};

}  // namespace onnxpar::cuda
