#pragma once

#include "abi/operator.h"
#include "kernels/io.h"

namespace onnxpar {

// The weights of the convolution that is a convolution's gradient by its image.
class TurnedWeights {
 public:
  // From [groups, many, few, taps] to [groups, few, many, taps reversed].
  struct Operands {
    Tensor w;
    Output y;
    size_t groups;
    size_t many;
    size_t few;
    size_t taps;
  };
  explicit TurnedWeights(const Node& node);
  Operands read(const Io& io) const;
  void host(const Io& io, const Operands& o) const;
  void device(const Io& io, const Operands& o) const;

 private:
  const int64_t groups_;
};

}  // namespace onnxpar
