// Parameters of softmax cross-entropy and its gradient.
#pragma once

#include "types.cuh"

namespace onnxpar::cuda {

enum class LossReduction : int { kMean, kSum, kNone };

struct Labels {
  const Index* of;
  const Element* weights;  // of the classes, all 1 where null
  Index count;
  Index classes;
  Index inner;
  Index ignore;  // that does not count
  bool ignores;
};

// Where the result of a label goes: to `each` where it is kept, else to values[i] with its weight.
struct Results {
  Element* each;
  double* values;
  double* weights;
};

// What the gradient of the loss says of each label.
struct Factor {
  const void* dloss;
  int dloss_type;
  LossReduction reduction;
  const double* total;  // the weight of all labels, where the reduction is a mean
};

}  // namespace onnxpar::cuda
