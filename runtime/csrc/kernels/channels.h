#pragma once

#include "abi/operator.h"
#include "kernels/io.h"

namespace onnxpar {

// A tensor [N, C, ...] as `outer` times `channels` runs of `inner` elements.
struct Channels {
  size_t outer;
  size_t channels;
  size_t inner;
};

// The sums over all elements of a channel that a batch normalisation and its gradient need: of
// (x - mean)^2, or of dy and of dy (x - mean).
class ChannelSums {
 public:
  struct Operands {
    Tensor dy;  // like x where only squares are summed
    Tensor x;
    Tensor mean;
    Output sums[2];
    Channels of;
  };
  ChannelSums(const Node&, bool squares) : squares_(squares) {}
  Operands read(const Io& io) const;
  void host(const Io& io, const Operands& o) const;
  void device(const Io& io, const Operands& o) const;

 private:
  const bool squares_;
};

class BatchNormInputGrad {
 public:
  // Of a channel, in the order of the inputs.
  enum Vector { kScale, kMean, kInverse, kTotal, kSlope, kVectors };
  struct Operands {
    Tensor dy;
    Tensor x;
    Tensor vectors[kVectors];
    Tensor count;
    Output dx;
    Channels of;
  };
  explicit BatchNormInputGrad(const Node&) {}
  Operands read(const Io& io) const;
  void host(const Io& io, const Operands& o) const;
  void device(const Io& io, const Operands& o) const;
};

}  // namespace onnxpar
