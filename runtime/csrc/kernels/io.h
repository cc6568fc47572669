// What the training kernels share: tensors as arrays of float or double, and pieces of work.
#pragma once

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "abi/ort_io.h"
#include "kernels/host/simd.h"

namespace onnxpar {

using Compute = std::function<void(const Io&)>;

inline constexpr int kAny = 0;
inline constexpr int kDouble = static_cast<int>(DType::kFloat64);
inline constexpr int kInt64 = static_cast<int>(DType::kInt64);

// Shape and type of an output: those of an input, and for some another shape.
struct Like {
  enum class Shape { kSame, kScalar, kLoss, kPooled };
  size_t input;
  Shape shape = Shape::kSame;
  bool wide = false;  // 16-bit types become float32
  int type = kAny;    // where it is not that of the input
};

struct KernelSpec {
  const char* name;
  // The types of the inputs. Where onnxruntime does not know the shape of the input that output i
  // is like, it gives the output the type of the last input of type kAny, so that one must be like
  // it: a tensor is not told from a scalar there.
  std::vector<int> inputs;
  size_t optional;  // how many of the last inputs may be left out
  bool variadic;    // the last input stands for one or more
  // The input that output i has its type and shape from; all outputs but the first may be left out
  // where `optional_outputs`.
  std::vector<Like> like;
  bool optional_outputs;
  // Pairs of input and output that may share memory.
  size_t (*in_place)(int** inputs, int** outputs);
  // Null where the function that graphs carry does on the host.
  Compute (*make)(const Attributes& attributes, size_t outputs);
  // The same for tensors on a GPU.
  Compute (*make_on_device)(const KernelAttributes& attributes, size_t outputs);
};

const std::vector<KernelSpec>& pointwise_kernels();
const std::vector<KernelSpec>& row_kernels();
const std::vector<KernelSpec>& loss_kernels();
const std::vector<KernelSpec>& gather_kernels();
const std::vector<KernelSpec>& update_kernels();
const std::vector<KernelSpec>& standard_kernels();

template <int... kInputs>
size_t in_place(int** inputs, int** outputs) {
  constexpr size_t kCount = sizeof...(kInputs);
  *inputs = new int[kCount]{kInputs...};
  *outputs = new int[kCount];
  for (size_t i = 0; i < kCount; ++i) (*outputs)[i] = static_cast<int>(i);
  return kCount;
}
size_t never_in_place(int** inputs, int** outputs);

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
  Writer(const Io& io, size_t index, const Shape& shape, DType type)
      : out_(io.output(index, shape)), data_(static_cast<T*>(out_)), type_(type) {
    if (type == DType::kFloat32 || type == DType::kFloat64) return;
    size_t count = 1;
    for (int64_t dim : shape) count *= static_cast<size_t>(dim);
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

// Throws std::invalid_argument where the tensor has not one element.
void expect_one(const Tensor& tensor, const char* name);
// The value of a tensor with one element. Throws std::invalid_argument where it has not one.
double scalar(const Tensor& tensor, const char* name);

// Throws std::invalid_argument where the tensor's type or shape is not that of the other.
void expect_like(const Tensor& tensor, const char* name, const Tensor& other,
                 const char* other_name);
void expect_type(const Tensor& tensor, const char* name, DType type);
void expect_count(const Tensor& tensor, const char* name, size_t count, const char* what);

// The number of elements that the dims from begin to before end have together.
size_t product(const Shape& shape, size_t begin, size_t end);
// The axis counted from 0. Throws std::invalid_argument where the shape has not that many dims.
size_t axis_of(const Shape& shape, int64_t axis);

// Elements in one piece of work: some microseconds, against 0.1 for handing it out.
inline constexpr size_t kPiece = 16384;

// Calls body(begin, length) for all of `count` in pieces, on the session's threads.
template <class Body>
void pieces(const Io& io, size_t count, size_t piece, const Body& body) {
  if (count == 0) return;
  struct Work {
    const Body& body;
    size_t count, piece;
  } work{body, count, piece};
  io.parallel((count + piece - 1) / piece, &work, [](void* data, size_t index) {
    const Work& w = *static_cast<const Work*>(data);
    const size_t begin = index * w.piece;
    w.body(begin, w.count - begin < w.piece ? w.count - begin : w.piece);
  });
}

}  // namespace onnxpar
