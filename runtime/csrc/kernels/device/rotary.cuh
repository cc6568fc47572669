// Parameters of rotary positions.
#pragma once

#include "types.cuh"

#if !defined(__CUDACC_RTC__) && !defined(__device__)
#define __device__
#endif

namespace onnxpar::cuda {

// The most groups of dims that angles may be broadcast over in turn.
constexpr int kAngleDims = 4;

// Where the angles of a row lie: a row is an index over `count` dims, the first of which runs
// fastest.
struct AngleRows {
  int count;
  Index size[kAngleDims];
  Index apart[kAngleDims];  // elements between the angles of neighbours
  __device__ Index of(Index row) const {
    Index at = 0;
    for (int i = 0; i < count; ++i) {
      at += row % size[i] * apart[i];
      row /= size[i];
    }
    return at;
  }
};

}  // namespace onnxpar::cuda
