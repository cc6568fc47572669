// Parameters of the gradients of layer and RMS normalisation.
#pragma once

#include "types.cuh"

namespace onnxpar::cuda {

// The tile of the kernels of columns.
constexpr int kTileColumns = 32;
constexpr int kTileRows = 8;

struct Norm {
  const Element* dy;
  const Element* x;
  const Element* scale;
  const void* mean;  // null if nothing is centred
  const void* inv_std;
  int mean_type;  // ONNX's number
  int inv_std_type;
  Index rows;
  Index n;  // elements of a row
};

}  // namespace onnxpar::cuda
