// Parameters of the gradient of layer normalisation.
#pragma once

#include "types.cuh"

namespace onnxpar::cuda {

// The tile of layer_norm_grad_columns.
constexpr int kTileColumns = 32;
constexpr int kTileRows = 8;

struct LayerNorm {
  const Element* dy;
  const Element* x;
  const Element* scale;
  const void* mean;
  const void* inv_std;
  int mean_type;  // ONNX's number
  int inv_std_type;
  Index rows;
  Index n;  // elements of a row
};

}  // namespace onnxpar::cuda
