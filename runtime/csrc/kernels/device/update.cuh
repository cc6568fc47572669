// Parameters of optimizer steps.
#pragma once

#include "types.cuh"

namespace onnxpar::cuda {

// The scalars of all steps.
enum Scalar : int {
  kScale,        // multiplies the gradient before all else; 1 where there is none
  kLearning,     // learning rate, with Adam's first correction in it
  kWeightDecay,  // times the parameter, added to the gradient; 0 where there is none
  kDecay,        // times the parameter, before the step; 1 where there is none
  kKeep1,        // what stays of the first moment, and the share of the gradient that comes
  kTake1,
  kKeep2,  // the same of the second
  kTake2,
  kCorrection2,  // square root of the second moment's correction
  kEps,
  kDampening,  // 1 - the share of the gradient that comes
  kFirst,      // 1 in the first step, in which the gradient is the moment
  kActive,     // 0 if nothing changes; 1 where there is none
  kScalars,
};

// Each points to a number where the operator's tensors lie; null if the operator does not have it.
// So a step on a device does not wait for the host, and may be captured and replayed.
struct Scalars {
  const double* of[kScalars];
};

// The gradient, and p and its moments; those of `to` may be those of `from`.
struct StepTensors {
  const Element* gradient;
  const Element* from[3];
  Element* to[3];
};

}  // namespace onnxpar::cuda
