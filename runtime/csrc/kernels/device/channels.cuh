// Parameters of the gradient of batch normalisation.
#pragma once

#include "types.cuh"

namespace onnxpar::cuda {

// A tensor [N, C, ...] as `outer` times `channels` runs of `inner` elements.
struct ChannelRuns {
  Index outer;
  Index channels;
  Index inner;
};

struct BatchNormGrad {
  const Element* dy;
  const Element* x;
  // One element for each channel.
  const Element* scale;
  const Element* mean;
  const Element* inv_std;
  const Element* total;
  const Element* slope;
  const Element* count;  // one element
};

}  // namespace onnxpar::cuda
