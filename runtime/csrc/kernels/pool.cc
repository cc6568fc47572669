#include "kernels/pool.h"

#include <algorithm>
#include <stdexcept>

namespace onnxpar {
namespace {

std::vector<int64_t> one_each(const Attributes& attributes, const char* name, size_t count,
                              int64_t otherwise, int64_t least) {
  std::vector<int64_t> values =
      attributes.integers(name).value_or(std::vector<int64_t>(count, otherwise));
  if (values.size() != count) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(values.size()) +
                                " numbers, expected " + std::to_string(count));
  }
  for (int64_t value : values) {
    if (value < least) {
      throw std::invalid_argument(std::string(name) + " has " + std::to_string(value) +
                                  ", expected at least " + std::to_string(least));
    }
  }
  return values;
}

}  // namespace

PoolWindows::PoolWindows(const Attributes& attributes)
    : kernel_(attributes.integers("kernel_shape").value_or(std::vector<int64_t>())) {
  if (kernel_.empty()) throw std::invalid_argument("kernel_shape is missing");
  kernel_ = one_each(attributes, "kernel_shape", kernel_.size(), 1, 1);
  stride_ = one_each(attributes, "strides", space(), 1, 1);
  dilation_ = one_each(attributes, "dilations", space(), 1, 1);
  pads_ = one_each(attributes, "pads", 2 * space(), 0, 0);
  ceil_ = attributes.integer("ceil_mode").value_or(0) != 0;
  const std::string padding = attributes.text("auto_pad").value_or("NOTSET");
  if (padding == "NOTSET") padding_ = Padding::kGiven;
  else if (padding == "VALID") padding_ = Padding::kNone;
  else if (padding == "SAME_UPPER") padding_ = Padding::kMoreAfter;
  else if (padding == "SAME_LOWER") padding_ = Padding::kMoreBefore;
  else throw std::invalid_argument("auto_pad is '" + padding + "', which ONNX does not know");
}

PoolDim PoolWindows::over(size_t dim, int64_t size) const {
  const int64_t stride = stride_[dim];
  const int64_t extent = (kernel_[dim] - 1) * dilation_[dim] + 1;
  if (padding_ == Padding::kMoreAfter || padding_ == Padding::kMoreBefore) {
    const int64_t results = (size + stride - 1) / stride;
    const int64_t padding = std::max<int64_t>(0, (results - 1) * stride + extent - size);
    return {results, (padding + (padding_ == Padding::kMoreBefore)) / 2};
  }
  const int64_t before = padding_ == Padding::kNone ? 0 : pads_[dim];
  const int64_t after = padding_ == Padding::kNone ? 0 : pads_[space() + dim];
  const int64_t steps = size + before + after - extent;
  if (steps < 0) {
    throw std::invalid_argument("a window of " + std::to_string(extent) +
                                " is longer than the dim of size " + std::to_string(size));
  }
  int64_t results = (steps + (ceil_ ? stride - 1 : 0)) / stride + 1;
  // A window that would begin in the padding behind is none.
  if (ceil_ && (results - 1) * stride >= size + before) --results;
  return {results, before};
}

Shape PoolWindows::results(const Shape& x) const {
  if (x.size() != space() + 2) {
    throw std::invalid_argument("x has shape " + to_text(x) + ", expected " +
                                std::to_string(space()) + " spatial dims");
  }
  Shape shape = x;
  for (size_t d = 0; d < space(); ++d) {
    if (x[d + 2] >= 0) shape[d + 2] = over(d, x[d + 2]).results;
  }
  return shape;
}

}  // namespace onnxpar
