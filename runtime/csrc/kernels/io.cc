#include "kernels/io.h"

namespace onnxpar {

template <class T>
void convert(T* to, const Tensor& from, const char* name) {
  const size_t count = from.count();
  switch (from.type) {
    case DType::kFloat32: {
      const float* values = static_cast<const float*>(from.data);
      for (size_t i = 0; i < count; ++i) to[i] = static_cast<T>(values[i]);
      return;
    }
    case DType::kFloat64: {
      const double* values = static_cast<const double*>(from.data);
      for (size_t i = 0; i < count; ++i) to[i] = static_cast<T>(values[i]);
      return;
    }
    case DType::kFloat16:
    case DType::kBfloat16: {
      std::vector<float> wide(count);
      widen(wide.data(), from.data, count, from.type);
      for (size_t i = 0; i < count; ++i) to[i] = static_cast<T>(wide[i]);
      return;
    }
    default: expect_float(from, name);  // throws
  }
}
template void convert(float*, const Tensor&, const char*);
template void convert(double*, const Tensor&, const char*);

void expect_float(const Tensor& tensor, const char* name) {
  with_real(tensor, name, [](auto) {});
}

void expect_one(const Tensor& tensor, const char* name) {
  if (tensor.count() != 1) {
    throw std::invalid_argument(std::string(name) + " has shape " + to_text(tensor.shape) +
                                ", expected one element");
  }
}

void expect_type(const Tensor& tensor, const char* name, DType type) {
  if (tensor.type != type) {
    throw std::invalid_argument(std::string(name) + " is " + dtype_name(tensor.type) +
                                ", expected " + dtype_name(type));
  }
}

void expect_like(const Tensor& tensor, const char* name, const Tensor& other,
                 const char* other_name) {
  expect_type(tensor, name, other.type);
  if (tensor.shape != other.shape) {
    throw std::invalid_argument(std::string(name) + " has shape " + to_text(tensor.shape) +
                                ", expected " + to_text(other.shape) + " as " + other_name);
  }
}

void expect_count(const Tensor& tensor, const char* name, size_t count, const char* what) {
  if (tensor.count() != count) {
    throw std::invalid_argument(std::string(name) + " has shape " + to_text(tensor.shape) +
                                ", expected " + std::to_string(count) + " elements, " + what);
  }
}

size_t axis_of(const Shape& shape, int64_t axis) {
  const int64_t rank = static_cast<int64_t>(shape.size());
  if (axis < -rank || axis >= rank) {
    throw std::invalid_argument("axis is " + std::to_string(axis) + " for a tensor of shape " +
                                to_text(shape));
  }
  return static_cast<size_t>(axis < 0 ? axis + rank : axis);
}

}  // namespace onnxpar
