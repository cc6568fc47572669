// What fused kernels share: tensors as arrays of float or double, and pieces of work.
#pragma once

#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "abi/ort_io.h"

namespace onnxpar {

// Memory of an output; none where the node leaves it out.
struct Output {
  void* data = nullptr;
  DType type = DType::kFloat32;
  Shape shape;
};
inline Output output(const Io& io, size_t index, const Shape& shape, DType type) {
  return {io.output(index, shape), type, shape};
}
inline Output output_like(const Io& io, size_t index, const Tensor& like) {
  return output(io, index, like.shape, like.type);
}

// Calls f with a zero of the type to compute in. Throws std::invalid_argument for no float type.
template <class F>
void with_real(const Tensor& tensor, const char* name, F&& f) {
  switch (tensor.type) {
    case DType::kFloat64: return f(double{});
    case DType::kFloat32:
    case DType::kFloat16:
    case DType::kBfloat16: return f(float{});
    default:
      throw std::invalid_argument(std::string(name) + " is " + dtype_name(tensor.type) +
                                  ", expected float32, float64, float16 or bfloat16");
  }
}

// Copies the elements of a float tensor of any width. Throws std::invalid_argument for others.
template <class T>
void convert(T* to, const Tensor& from, const char* name);

// A tensor's elements as T; a copy where it holds another type.
template <class T>
class Reader {
 public:
  Reader(const Tensor& tensor, const char* name) : data_(static_cast<const T*>(tensor.data)) {
    constexpr DType kOwn = sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64;
    if (tensor.type == kOwn) return;
    copy_.resize(tensor.count());
    convert(copy_.data(), tensor, name);
    data_ = copy_.data();
  }
  Reader(const Reader&) = delete;
  Reader(Reader&&) = default;
  const T* data() const { return data_; }

 private:
  const T* data_;
  std::vector<T> copy_;
};

// An output to be written as T; `finish` rounds where it holds a narrower type.
template <class T>
class Writer {
 public:
  explicit Writer(const Output& to)
      : out_(to.data), data_(static_cast<T*>(out_)), type_(to.type) {
    if (to.type == DType::kFloat32 || to.type == DType::kFloat64) return;
    size_t count = 1;
    for (int64_t dim : to.shape) count *= static_cast<size_t>(dim);
    copy_.resize(count);
    data_ = copy_.data();
  }
  T* data() { return data_; }
  void finish() {
    if constexpr (sizeof(T) == 4) {
      if (out_ != nullptr && !copy_.empty()) narrow(out_, copy_.data(), copy_.size(), type_);
    }
  }

 private:
  void* out_;
  T* data_;
  DType type_;
  std::vector<T> copy_;
};

// Throw std::invalid_argument.
void expect_float(const Tensor& tensor, const char* name);
// One element.
void expect_one(const Tensor& tensor, const char* name);

// The type and shape of the other.
void expect_like(const Tensor& tensor, const char* name, const Tensor& other,
                 const char* other_name);
void expect_type(const Tensor& tensor, const char* name, DType type);
void expect_count(const Tensor& tensor, const char* name, size_t count, const char* what);

// The axis counted from 0. Throws std::invalid_argument where the shape has not that many dims.
size_t axis_of(const Shape& shape, int64_t axis);

// Elements in one piece of work: some microseconds, against 0.1 for handing it out.
inline constexpr size_t kPiece = 16384;

// Calls body(begin, length) for all of `count` in pieces, on the session's threads. What one of the
// calls throws is thrown after all of them: no exception may pass onnxruntime's threads.
template <class Body>
void pieces(const Io& io, size_t count, size_t piece, const Body& body) {
  if (count == 0) return;
  struct Work {
    const Body& body;
    size_t count, piece;
    std::mutex mutex;
    std::exception_ptr failure;
  } work{body, count, piece, {}, nullptr};
  io.parallel((count + piece - 1) / piece, &work, [](void* data, size_t index) {
    Work& w = *static_cast<Work*>(data);
    const size_t begin = index * w.piece;
    try {
      w.body(begin, w.count - begin < w.piece ? w.count - begin : w.piece);
    } catch (...) {
      std::lock_guard lock(w.mutex);
      w.failure = std::current_exception();
    }
  });
  if (work.failure) std::rethrow_exception(work.failure);
}

}  // namespace onnxpar
