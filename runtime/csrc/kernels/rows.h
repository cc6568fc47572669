#pragma once

#include "abi/operator.h"
#include "kernels/host/simd.h"
#include "kernels/io.h"

namespace onnxpar {

// The gradient of softmax or its logarithm.
class SoftmaxGrad {
 public:
  struct Rule {
    const char* kernel;  // what those on a device are called by
    Choice<GradLoop> rows;
    Choice<ColumnLoop> columns;
  };
  // `n` elements along the axis, `inner` apart, in each of `outer` slabs.
  struct Operands {
    Tensor dy;
    Tensor y;
    Output dx;
    size_t outer;
    size_t n;
    size_t inner;
  };
  SoftmaxGrad(const Node& node, const Rule& rule);
  Operands read(const Io& io) const;
  void host(const Io& io, const Operands& o) const;
  void device(const Io& io, const Operands& o) const;

 private:
  const Rule rule_;
  const int64_t axis_;
};

// The gradient of layer normalisation or, without mean and bias, of RMS normalisation.
class NormGrad {
 public:
  struct Rule {
    const char* kernel;  // what those on a device are called by
    Choice<NormLoop> row;
    bool centred;  // whether there are a mean and a bias
  };
  struct Operands {
    Tensor dy;
    Tensor x;
    Tensor scale;
    Tensor mean;  // empty if nothing is centred
    Tensor inv_std;
    Output dx;
    Output sums[2];  // dscale and dbias
    size_t rows;
    size_t n;  // elements of a row
  };
  NormGrad(const Node& node, const Rule& rule);
  Operands read(const Io& io) const;
  void host(const Io& io, const Operands& o) const;
  void device(const Io& io, const Operands& o) const;

 private:
  const Rule rule_;
  const int64_t axis_;
  const size_t outputs_;
};

}  // namespace onnxpar
