// The part of onnxruntime's C interface that this library uses, declared by ourselves.
//
// No onnxruntime package has C headers. Its C interface only grows at the end: the position of an
// entry in the function table and the offset of a field in OrtCustomOp never change once released. So
// we declare the entries that we use, by position. The tests call every entry below; a wrong position
// causes a crash or a wrong value there.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnxpar::ort {

// Opaque types of onnxruntime, only used by pointer.
struct Status;
struct KernelInfo;
struct KernelContext;
struct Value;
struct SessionOptions;
struct CustomOpDomain;
struct TensorInfo;
struct ShapeContext;
struct OpAttr;
struct CustomOp;
struct Env;
struct MemoryInfo;
struct Allocator;

// The interface version of the newest entry or field that we use.
inline constexpr uint32_t kVersion = 18;

inline constexpr int kFail = 1;             // OrtErrorCode: ORT_FAIL
inline constexpr int kInvalidArgument = 2;  // OrtErrorCode: ORT_INVALID_ARGUMENT
inline constexpr int kRequired = 0;         // OrtCustomOpInputOutputCharacteristic
inline constexpr int kOptional = 1;
inline constexpr int kVariadic = 2;
// The result of OrtCustomOp's GetExecutionProviderType; null for the CPU.
inline constexpr const char* kCudaProvider = "CUDAExecutionProvider";
inline constexpr int kMemoryDefault = 0;  // OrtMemType
inline constexpr int kMemoryCpuInput = -2;
inline constexpr int kDeviceAllocator = 0;  // OrtAllocatorType
inline constexpr int kLogError = 3;         // OrtLoggingLevel
inline constexpr int kAttrInt = 1;  // OrtOpAttrType
inline constexpr int kAttrInts = 2;
inline constexpr int kAttrFloat = 3;
inline constexpr int kAttrString = 5;

// The entries of OrtApi in use, typed. The number is the position in the table.
#define ONNXPAR_ORT_API(X)                                                                      \
  X(0, create_status, Status* (*)(int, const char*))                                            \
  X(2, get_error_message, const char* (*)(const Status*))                                       \
  X(3, create_env, Status* (*)(int, const char*, Env**))                                        \
  X(26, create_domain, Status* (*)(const char*, CustomOpDomain**))                              \
  X(27, domain_add, Status* (*)(CustomOpDomain*, const CustomOp*))                              \
  X(28, add_domain, Status* (*)(SessionOptions*, CustomOpDomain*))                              \
  X(51, tensor_data, Status* (*)(Value*, void**))                                               \
  X(57, create_tensor_info, Status* (*)(TensorInfo**))                                          \
  X(58, set_element_type, Status* (*)(TensorInfo*, int))                                        \
  X(59, set_dims, Status* (*)(TensorInfo*, const int64_t*, size_t))                             \
  X(60, element_type, Status* (*)(const TensorInfo*, int*))                                     \
  X(61, dims_count, Status* (*)(const TensorInfo*, size_t*))                                    \
  X(62, dims, Status* (*)(const TensorInfo*, int64_t*, size_t))                                 \
  X(63, symbolic_dims, Status* (*)(const TensorInfo*, const char**, size_t))                    \
  X(65, type_and_shape, Status* (*)(const Value*, TensorInfo**))                                \
  X(69, cpu_memory_info, Status* (*)(int, int, MemoryInfo**))                                   \
  X(85, attr_float, Status* (*)(const KernelInfo*, const char*, float*))                        \
  X(86, attr_int, Status* (*)(const KernelInfo*, const char*, int64_t*))                        \
  X(87, attr_string, Status* (*)(const KernelInfo*, const char*, char*, size_t*))               \
  X(88, input_count, Status* (*)(const KernelContext*, size_t*))                                \
  X(90, input, Status* (*)(const KernelContext*, size_t, const Value**))                        \
  X(91, output, Status* (*)(KernelContext*, size_t, const int64_t*, size_t, Value**))           \
  X(93, release_status, void (*)(Status*))                                                      \
  X(99, release_tensor_info, void (*)(TensorInfo*))                                             \
  X(163, attr_ints, Status* (*)(const KernelInfo*, const char*, int64_t*, size_t*))             \
  X(176, register_allocator, Status* (*)(Env*, Allocator*))                                     \
  X(177, unregister_allocator, Status* (*)(Env*, const MemoryInfo*))                            \
  X(193, gpu_stream, Status* (*)(const KernelContext*, void**))                                 \
  X(231, info_output_count, Status* (*)(const KernelInfo*, size_t*))                            \
  X(237, has_entry, Status* (*)(const SessionOptions*, const char*, int*))                      \
  X(238, entry, Status* (*)(const SessionOptions*, const char*, char*, size_t*))                \
  X(244, node_name, Status* (*)(const KernelInfo*, char*, size_t*))                             \
  X(267, shape_input_count, Status* (*)(const ShapeContext*, size_t*))                          \
  X(268, shape_input, Status* (*)(const ShapeContext*, size_t, TensorInfo**))                   \
  X(269, shape_attr, Status* (*)(const ShapeContext*, const char*, const OpAttr**))             \
  X(270, shape_set_output, Status* (*)(const ShapeContext*, size_t, const TensorInfo*))         \
  X(271, set_symbolic_dims, Status* (*)(TensorInfo*, const char**, size_t))                     \
  X(272, read_attr, Status* (*)(const OpAttr*, int, void*, size_t, size_t*))                    \
  X(274, parallel_for,                                                                          \
    Status* (*)(const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*))

struct Api {
#define X(slot, name, ...)        \
  using name##_t = __VA_ARGS__;   \
  name##_t name = nullptr;
  ONNXPAR_ORT_API(X)
#undef X

  // `table` is what OrtApiBase::GetApi(kVersion) returned.
  static Api load(const void* const* table) {
    Api api;
#define X(slot, name, ...) api.name = reinterpret_cast<name##_t>(const_cast<void*>(table[slot]));
    ONNXPAR_ORT_API(X)
#undef X
    return api;
  }
};

// A status of any version's table of functions: what makes one has the first slot of all.
inline Status* make_status(const void* const* table, int code, const char* message) {
  return reinterpret_cast<Api::create_status_t>(const_cast<void*>(table[0]))(code, message);
}

struct ApiBase {
  const void* const* (*get_api)(uint32_t version);
  const char* (*version_string)();
};

// OrtAllocator as of version 17: later fields are not read where `version` is less.
struct Allocator {
  uint32_t version;
  void* (*alloc)(Allocator*, size_t);
  void (*free)(Allocator*, void*);
  const MemoryInfo* (*info)(const Allocator*);
};
inline constexpr uint32_t kAllocatorVersion = 17;
static_assert(offsetof(Allocator, info) == 24);

// OrtCustomOp as of version 18.
struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, const void* api, const KernelInfo*);
  const char* (*name)(const CustomOp*);
  const char* (*execution_provider)(const CustomOp*);
  int (*input_type)(const CustomOp*, size_t);
  size_t (*input_type_count)(const CustomOp*);
  int (*output_type)(const CustomOp*, size_t);
  size_t (*output_type_count)(const CustomOp*);
  void (*compute)(void* kernel, KernelContext*);
  void (*destroy)(void* kernel);
  int (*input_characteristic)(const CustomOp*, size_t);
  int (*output_characteristic)(const CustomOp*, size_t);
  int (*input_memory)(const CustomOp*, size_t);
  int (*variadic_input_min)(const CustomOp*);
  int (*variadic_input_homogeneous)(const CustomOp*);
  int (*variadic_output_min)(const CustomOp*);
  int (*variadic_output_homogeneous)(const CustomOp*);
  Status* (*create_kernel_v2)(const CustomOp*, const void* api, const KernelInfo*, void** kernel);
  Status* (*compute_v2)(void* kernel, KernelContext*);
  Status* (*infer_shape)(const CustomOp*, ShapeContext*);
  int (*start_version)(const CustomOp*);
  int (*end_version)(const CustomOp*);
  size_t (*may_inplace)(int** inputs, int** outputs);
  void (*release_may_inplace)(int* inputs, int* outputs);
  size_t (*alias_map)(int** inputs, int** outputs);
  void (*release_alias_map)(int* inputs, int* outputs);
};
static_assert(offsetof(CustomOp, destroy) == 72);
static_assert(offsetof(CustomOp, input_memory) == 96);
static_assert(offsetof(CustomOp, create_kernel_v2) == 136);
static_assert(offsetof(CustomOp, infer_shape) == 152);
static_assert(offsetof(CustomOp, release_alias_map) == 200);
static_assert(sizeof(CustomOp) == 208);

}  // namespace onnxpar::ort
