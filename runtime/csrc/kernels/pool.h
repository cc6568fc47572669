// The windows of a pool, as ONNX's attributes say them.
#pragma once

#include <optional>
#include <vector>

#include "abi/values.h"

namespace onnxpar {

struct PoolDim {
  int64_t results;
  int64_t before;  // padding
};

class PoolWindows {
 public:
  // Throws std::invalid_argument where the attributes do not fit together.
  explicit PoolWindows(const Attributes& attributes);

  size_t space() const { return kernel_.size(); }
  // Of a spatial dim of this size. Throws std::invalid_argument where no window fits.
  PoolDim over(size_t dim, int64_t size) const;
  int64_t kernel(size_t dim) const { return kernel_[dim]; }
  int64_t stride(size_t dim) const { return stride_[dim]; }
  int64_t dilation(size_t dim) const { return dilation_[dim]; }
  // The shape of the results; a size that is unknown is negative. Throws std::invalid_argument.
  Shape results(const Shape& x) const;

 private:
  enum class Padding { kGiven, kNone, kMoreAfter, kMoreBefore };
  std::vector<int64_t> kernel_, stride_, dilation_, pads_;
  Padding padding_;
  bool ceil_;
};

}  // namespace onnxpar
