#pragma once

#include <memory>

#include "abi/operator.h"
#include "kernels/device/queue.h"
#include "kernels/io.h"

namespace onnxpar {

class GatherGrad {
 public:
  // `rows` rows of `inner` elements in each of `outer` slabs, and how many are taken of each slab.
  struct Operands {
    Tensor dy;
    Tensor indices;
    Output dx;
    size_t outer;
    size_t rows;
    size_t inner;
    size_t count;
  };
  explicit GatherGrad(const Node& node);
  Operands read(const Io& io) const;
  void host(const Io& io, const Operands& g) const;
  void device(const Io& io, const Operands& g) const;

 private:
  const int64_t axis_;
  const std::shared_ptr<cuda::FaultReport> faults_;
};

}  // namespace onnxpar
