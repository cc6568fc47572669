// Attributes, inputs and outputs of a kernel, over onnxruntime's C interface.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "abi/dtype.h"
#include "abi/ort_abi.h"
#include "abi/values.h"

namespace onnxpar {

// The interface of the onnxruntime that loaded this library; set by RegisterCustomOps.
const ort::Api& api();
void set_api(const ort::Api& api);

// Throws std::runtime_error with onnxruntime's message if a call failed.
void check(ort::Status* status);

struct Tensor {
  const void* data = nullptr;
  DType type = DType::kFloat32;
  Shape shape;
  size_t count() const { return product(shape); }
  size_t bytes() const { return bytes_of(shape, type); }
  // The values of an int64 tensor.
  std::vector<int64_t> integers() const;
};

class Io {
 public:
  explicit Io(ort::KernelContext* context) : context_(context) {}
  size_t inputs() const;
  Tensor input(size_t index) const;
  // Memory of the output, allocated by onnxruntime; null if the node leaves it out.
  void* output(size_t index, const Shape& shape) const;
  // Writes the token that chains the next collective.
  void token(size_t index) const;
  Stream stream() const;
  // Calls body(data, i) for all i below `total`, in any order, on the session's threads.
  void parallel(size_t total, void* data, void (*body)(void*, size_t)) const;

 private:
  ort::KernelContext* context_;
};

class KernelAttributes : public Attributes {
 public:
  explicit KernelAttributes(const ort::KernelInfo* info) : info_(info) {}
  std::optional<int64_t> integer(const char* name) const override;
  std::optional<std::string> text(const char* name) const override;
  std::optional<std::vector<int64_t>> integers(const char* name) const override;
  std::optional<double> real(const char* name) const override;
  std::string node() const;
  size_t outputs() const;

 private:
  const ort::KernelInfo* info_;
};

class ShapeAttributes : public Attributes {
 public:
  explicit ShapeAttributes(const ort::ShapeContext* context) : context_(context) {}
  std::optional<int64_t> integer(const char* name) const override;
  std::optional<std::string> text(const char* name) const override;
  std::optional<std::vector<int64_t>> integers(const char* name) const override;
  std::optional<double> real(const char* name) const override;

 private:
  const ort::OpAttr* find(const char* name) const;
  template <class T>
  std::optional<T> number(const char* name, int kind) const;
  const ort::ShapeContext* context_;
};

// Type and shape in shape inference: unknown dims are negative, with a name or "".
struct SymbolicTensor {
  int type = 0;
  Shape shape;
  std::vector<std::string> names;
};

SymbolicTensor inferred_input(const ort::ShapeContext* context, size_t index);
void infer_output(const ort::ShapeContext* context, size_t index, const SymbolicTensor& tensor);

}  // namespace onnxpar
