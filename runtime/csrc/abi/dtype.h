// Element types, reductions over them, and the reduction kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace onnxpar {

// Numbered as in onnx.TensorProto.DataType, which is also onnxruntime's numbering.
enum class DType : int {
  kFloat32 = 1,
  kUint8 = 2,
  kInt8 = 3,
  kUint16 = 4,
  kInt16 = 5,
  kInt32 = 6,
  kInt64 = 7,
  kBool = 9,
  kFloat16 = 10,
  kFloat64 = 11,
  kUint32 = 12,
  kUint64 = 13,
  kBfloat16 = 16,
};

// For bool, sum and max mean "or", prod and min mean "and". Integers wrap around. A float max or min
// with a NaN is NaN, and +0 is greater than -0. So every reduction is commutative, and all ranks agree
// to the bit in whatever order the transport combines the values (except for the payloads of NaN).
enum class Reduction : int { kSum = 0, kMax = 1, kMin = 2, kProd = 3 };

// Throws std::invalid_argument if the type is not in DType.
DType dtype_from_onnx(int onnx_type);
size_t dtype_size(DType type);
const char* dtype_name(DType type);

// Throws std::invalid_argument for an unknown name.
Reduction reduction_from_name(const std::string& name);
const char* reduction_name(Reduction reduction);

// Whether the reduction of the type is accumulated in float32, a wider type.
bool accumulates_wide(DType type, Reduction reduction);
// Between a 16-bit float type and float32, which holds all its values; rounds to nearest even.
void widen(float* to, const void* from, size_t count, DType type);
void narrow(void* to, const float* from, size_t count, DType type);

// dst[i] = reduce(srcs[0][i], srcs[1][i], …) in that order. dst may be one of the sources. 16-bit
// floats are accumulated in float32 over all sources and rounded once.
void reduce_many(void* dst, const void* const* srcs, size_t sources, size_t count, DType type,
                 Reduction reduction);

}  // namespace onnxpar
