#include "abi/ort_io.h"

#include <atomic>
#include <stdexcept>

namespace onnxpar {
namespace {

ort::Api g_api;

class TensorInfo {
 public:
  explicit TensorInfo(ort::TensorInfo* info) : info_(info) {}
  ~TensorInfo() { g_api.release_tensor_info(info_); }
  TensorInfo(const TensorInfo&) = delete;
  TensorInfo& operator=(const TensorInfo&) = delete;

  int type() const {
    int type = 0;
    check(g_api.element_type(info_, &type));
    return type;
  }
  Shape shape() const {
    size_t dims = 0;
    check(g_api.dims_count(info_, &dims));
    Shape shape(dims);
    check(g_api.dims(info_, shape.data(), dims));
    return shape;
  }
  ort::TensorInfo* get() const { return info_; }

 private:
  ort::TensorInfo* info_;
};

// Whether the call succeeded; an error is dropped.
bool succeeded(ort::Status* status) {
  if (status == nullptr) return true;
  g_api.release_status(status);
  return false;
}

// A text that read(buffer, &size) gives, with a first call for its size; nothing if it has none.
template <class Read>
std::optional<std::string> read_text(Read read) {
  size_t size = 0;
  if (!succeeded(read(nullptr, &size)) || size == 0) return std::nullopt;
  std::string value(size, '\0');
  check(read(value.data(), &size));
  value.resize(size - 1);  // the size counts the terminating zero
  return value;
}

}  // namespace

const ort::Api& api() { return g_api; }
void set_api(const ort::Api& api) { g_api = api; }

void check(ort::Status* status) {
  if (status == nullptr) return;
  const std::string message = g_api.get_error_message(status);
  g_api.release_status(status);
  throw std::runtime_error(message);
}

std::vector<int64_t> Tensor::integers() const {
  const int64_t* values = static_cast<const int64_t*>(data);
  return {values, values + count()};
}

size_t Io::inputs() const {
  size_t count = 0;
  check(g_api.input_count(context_, &count));
  return count;
}

Tensor Io::input(size_t index) const {
  const ort::Value* value = nullptr;
  check(g_api.input(context_, index, &value));
  if (value == nullptr) {
    throw std::invalid_argument("input " + std::to_string(index) + " is missing");
  }
  ort::TensorInfo* raw = nullptr;
  check(g_api.type_and_shape(value, &raw));
  const TensorInfo info(raw);
  Tensor tensor;
  tensor.type = dtype_from_onnx(info.type());
  tensor.shape = info.shape();
  void* data = nullptr;
  check(g_api.tensor_data(const_cast<ort::Value*>(value), &data));
  tensor.data = data;
  return tensor;
}

void* Io::output(size_t index, const Shape& shape) const {
  ort::Value* value = nullptr;
  check(g_api.output(context_, index, shape.data(), shape.size(), &value));
  if (value == nullptr) return nullptr;
  void* data = nullptr;
  check(g_api.tensor_data(value, &data));
  return data;
}

void Io::token(size_t index) const {
  void* data = output(index, {1});
  if (data != nullptr) *static_cast<uint8_t*>(data) = 0;
}

Stream Io::stream() const {
  void* stream = nullptr;
  check(g_api.gpu_stream(context_, &stream));
  return stream;
}

void Io::parallel(size_t total, void* data, void (*body)(void*, size_t)) const {
  check(g_api.parallel_for(context_, body, total, 0, data));
}

std::optional<int64_t> KernelAttributes::integer(const char* name) const {
  int64_t value = 0;
  if (!succeeded(g_api.attr_int(info_, name, &value))) return std::nullopt;
  return value;
}

std::optional<std::string> KernelAttributes::text(const char* name) const {
  return read_text(
      [&](char* to, size_t* size) { return g_api.attr_string(info_, name, to, size); });
}

std::optional<std::vector<int64_t>> KernelAttributes::integers(const char* name) const {
  size_t size = 0;
  if (!succeeded(g_api.attr_ints(info_, name, nullptr, &size))) return std::nullopt;
  std::vector<int64_t> values(size);
  if (size != 0) check(g_api.attr_ints(info_, name, values.data(), &size));
  return values;
}

std::optional<double> KernelAttributes::real(const char* name) const {
  float value = 0;
  if (!succeeded(g_api.attr_float(info_, name, &value))) return std::nullopt;
  return value;
}

std::string KernelAttributes::node() const {
  const auto read = [&](char* to, size_t* size) { return g_api.node_name(info_, to, size); };
  return read_text(read).value_or("");
}

size_t KernelAttributes::outputs() const {
  size_t count = 0;
  check(g_api.info_output_count(info_, &count));
  return count;
}

const ort::OpAttr* ShapeAttributes::find(const char* name) const {
  const ort::OpAttr* attribute = nullptr;
  if (!succeeded(g_api.shape_attr(context_, name, &attribute))) return nullptr;
  return attribute;
}

template <class T>
std::optional<T> ShapeAttributes::number(const char* name, int kind) const {
  const ort::OpAttr* attribute = find(name);
  if (attribute == nullptr) return std::nullopt;
  T value = 0;
  size_t size = 0;
  check(g_api.read_attr(attribute, kind, &value, sizeof(value), &size));
  return value;
}

std::optional<int64_t> ShapeAttributes::integer(const char* name) const {
  return number<int64_t>(name, ort::kAttrInt);
}

std::optional<std::string> ShapeAttributes::text(const char* name) const {
  const ort::OpAttr* attribute = find(name);
  if (attribute == nullptr) return std::nullopt;
  std::string value(64, '\0');  // the longest legal value is the name of an operator
  size_t size = 0;
  check(g_api.read_attr(attribute, ort::kAttrString, value.data(), value.size(), &size));
  value.resize(value.find('\0') < size ? value.find('\0') : size);
  return value;
}

std::optional<std::vector<int64_t>> ShapeAttributes::integers(const char* name) const {
  const ort::OpAttr* attribute = find(name);
  if (attribute == nullptr) return std::nullopt;
  // The length is unknown: a call with a buffer that is too small fails and returns the needed size.
  std::vector<int64_t> values(1024);
  size_t bytes = 0;
  if (!succeeded(g_api.read_attr(attribute, ort::kAttrInts, values.data(),
                                 values.size() * sizeof(int64_t), &bytes))) {
    values.resize(bytes / sizeof(int64_t));
    check(g_api.read_attr(attribute, ort::kAttrInts, values.data(), bytes, &bytes));
  }
  values.resize(bytes / sizeof(int64_t));
  return values;
}

std::optional<double> ShapeAttributes::real(const char* name) const {
  return number<float>(name, ort::kAttrFloat);
}

SymbolicTensor inferred_input(const ort::ShapeContext* context, size_t index) {
  ort::TensorInfo* raw = nullptr;
  check(g_api.shape_input(context, index, &raw));
  // onnxruntime owns it, so it must not be released here.
  SymbolicTensor tensor;
  check(g_api.element_type(raw, &tensor.type));
  size_t dims = 0;
  check(g_api.dims_count(raw, &dims));
  tensor.shape.resize(dims);
  check(g_api.dims(raw, tensor.shape.data(), dims));
  std::vector<const char*> names(dims, "");
  check(g_api.symbolic_dims(raw, names.data(), dims));
  for (const char* name : names) tensor.names.emplace_back(name == nullptr ? "" : name);
  return tensor;
}

void infer_output(const ort::ShapeContext* context, size_t index, const SymbolicTensor& tensor) {
  ort::TensorInfo* raw = nullptr;
  check(g_api.create_tensor_info(&raw));
  const TensorInfo info(raw);
  check(g_api.set_element_type(raw, tensor.type));
  check(g_api.set_dims(raw, tensor.shape.data(), tensor.shape.size()));
  // An unknown dim must have a unique name: onnxruntime assumes that dims with equal names are equal
  // when it plans memory.
  static std::atomic<uint64_t> unknown{0};
  std::vector<std::string> names = tensor.names;
  for (size_t i = 0; i < names.size(); ++i) {
    if (tensor.shape[i] >= 0) names[i].clear();
    if (tensor.shape[i] < 0 && names[i].empty()) {
      names[i] = "onnxpar_unknown_" + std::to_string(unknown++);
    }
  }
  std::vector<const char*> texts;
  for (const std::string& name : names) texts.push_back(name.c_str());
  check(g_api.set_symbolic_dims(raw, texts.data(), texts.size()));
  check(g_api.shape_set_output(context, index, raw));
}

}  // namespace onnxpar
