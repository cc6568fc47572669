// Element types, reductions over them, and the reduction kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "abi/values.h"

namespace onnxpar {

// Each element type: its name, its number in onnx.TensorProto.DataType, which is also onnxruntime's,
// and the type of an element in dtype.cc.
#define ONNXPAR_DTYPES(X)              \
  X(Float32, "float32", 1, float)      \
  X(Uint8, "uint8", 2, uint8_t)        \
  X(Int8, "int8", 3, int8_t)           \
  X(Uint16, "uint16", 4, uint16_t)     \
  X(Int16, "int16", 5, int16_t)        \
  X(Int32, "int32", 6, int32_t)        \
  X(Int64, "int64", 7, int64_t)        \
  X(Bool, "bool", 9, Bool)             \
  X(Float16, "float16", 10, Float16)   \
  X(Float64, "float64", 11, double)    \
  X(Uint32, "uint32", 12, uint32_t)    \
  X(Uint64, "uint64", 13, uint64_t)    \
  X(Bfloat16, "bfloat16", 16, Bfloat16)

enum class DType : int {
#define ONNXPAR_NUMBER(name, text, number, type) k##name = number,
  ONNXPAR_DTYPES(ONNXPAR_NUMBER)
#undef ONNXPAR_NUMBER
};

// For bool, sum and max mean "or", prod and min mean "and". Integers wrap around. A float max or min
// with a NaN is NaN, and +0 is greater than -0. So every reduction is commutative, and all ranks agree
// to the bit in whatever order the transport combines the values (except for the payloads of NaN).
enum class Reduction : int { kSum = 0, kMax = 1, kMin = 2, kProd = 3 };

// Throws std::invalid_argument if the type is not in DType.
DType dtype_from_onnx(int64_t onnx_type);
size_t dtype_size(DType type);
const char* dtype_name(DType type);
// The bytes of a tensor. Throws std::invalid_argument for a negative dim, and for 2^63 bytes or more.
size_t bytes_of(const Shape& shape, DType type);

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
