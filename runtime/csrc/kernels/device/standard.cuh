// Parameters of MaxPool.
#pragma once

#include "types.cuh"

namespace onnxpar::cuda {

// Up to three spatial dims; missing ones come first and have size 1.
constexpr int kSpace = 3;
struct Window {
  Index size[kSpace], results[kSpace], kernel[kSpace], stride[kSpace], dilation[kSpace];
  Index before[kSpace];
};

}  // namespace onnxpar::cuda
