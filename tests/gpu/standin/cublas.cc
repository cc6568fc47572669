// cuBLAS without a GPU: matrix products, as onnxruntime calls them, are real; all else computes nothing.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "device.h"
#include "numbers.h"
#include "streams.h"

namespace {

constexpr int kSuccess = 0, kFailed = 13, kNotSupported = 15;          // cublasStatus_t
constexpr int kFloat = 0, kDouble = 1, kHalf = 2, kBrain = 14;         // cudaDataType
constexpr int kKeepRows = 0;                                           // CUBLAS_OP_N

struct Handle {
  void* stream;
};

size_t bytes_of(int type) { return type == kDouble ? 8 : type == kFloat ? 4 : 2; }

double get(const char* at, int type) {
  double wide;
  float single;
  uint16_t narrow;
  switch (type) {
    case kDouble: memcpy(&wide, at, 8); return wide;
    case kFloat: memcpy(&single, at, 4); return static_cast<double>(single);
    default: memcpy(&narrow, at, 2);
  }
  return static_cast<double>(type == kHalf ? from_half(narrow) : from_brain(narrow));
}

void set(char* at, int type, double value) {
  float const single = static_cast<float>(value);
  uint16_t const narrow = type == kHalf ? to_half(single) : to_brain(single);
  switch (type) {
    case kDouble: memcpy(at, &value, 8); break;
    case kFloat: memcpy(at, &single, 4); break;
    default: memcpy(at, &narrow, 2);
  }
}

struct Operand {
  const void* data;
  int type;
  bool turned;
  int leading;
  long long stride;

  // The [rows, columns] matrix of one product, by rows.
  std::vector<double> read(int batch, int rows, int columns) const {
    size_t const item = bytes_of(type);
    const char* base = static_cast<const char*>(data) + item * static_cast<size_t>(batch * stride);
    std::vector<double> values;
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j) {
        size_t const at = static_cast<size_t>(turned ? i : j) * static_cast<size_t>(leading) +
                          static_cast<size_t>(turned ? j : i);
        values.push_back(get(base + item * at, type));
      }
    }
    return values;
  }
};

struct Target {
  void* data;
  int type;
  int leading;
  long long stride;
};

// c = alpha a b + beta c, of columns, in float64, rounded once.
int multiply(Handle* handle, int m, int n, int k, double alpha, Operand a, Operand b, double beta,
             Target c, int count) {
  for (int type : {a.type, b.type, c.type}) {
    if (type != kFloat && type != kDouble && type != kHalf && type != kBrain) return kNotSupported;
  }
  auto const work = [=] {
    StandinAccess access;
    for (int batch = 0; batch < count; ++batch) {
      std::vector<double> const left = a.read(batch, m, k), right = b.read(batch, k, n);
      std::vector<double> sums(static_cast<size_t>(n));
      for (int i = 0; i < m; ++i) {
        std::fill(sums.begin(), sums.end(), 0.0);
        for (int p = 0; p < k; ++p) {
          double const factor = left[static_cast<size_t>(i) * static_cast<size_t>(k) +
                                     static_cast<size_t>(p)];
          const double* row = right.data() + static_cast<size_t>(p) * static_cast<size_t>(n);
          for (size_t j = 0; j < sums.size(); ++j) sums[j] += factor * row[j];
        }
        for (int j = 0; j < n; ++j) {
          char* at = static_cast<char*>(c.data) +
                     bytes_of(c.type) * static_cast<size_t>(batch * c.stride +
                                                            static_cast<long long>(j) * c.leading + i);
          double const before = beta == 0 ? 0 : beta * get(at, c.type);
          set(at, c.type, alpha * sums[static_cast<size_t>(j)] + before);
        }
      }
    }
  };
  standin::compute(handle->stream, 2.0 * m * n * k * count);
  return standin::enqueue(handle->stream, work) == 0 ? kSuccess : kFailed;
}

double scalar(const void* at, bool is_double) {
  return get(static_cast<const char*>(at), is_double ? kDouble : kFloat);
}

bool in_double(int compute) { return compute == 70 || compute == 71; }  // CUBLAS_COMPUTE_64F

}  // namespace

extern "C" {

int cublasCreate_v2(Handle** handle) {
  *handle = new Handle{};
  return kSuccess;
}
int cublasDestroy_v2(Handle* handle) {
  delete handle;
  return kSuccess;
}
int cublasSetStream_v2(Handle* handle, void* stream) {
  handle->stream = stream;
  return kSuccess;
}
int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return kSuccess;
}
const char* cublasGetStatusName(int) { return "CUBLAS_STATUS"; }
const char* cublasGetStatusString(int) { return "status of the stand-in"; }

int cublasGemmStridedBatchedEx(Handle* handle, int turn_a, int turn_b, int m, int n, int k,
                               const void* alpha, const void* a, int a_type, int lda,
                               long long a_stride, const void* b, int b_type, int ldb,
                               long long b_stride, const void* beta, void* c, int c_type, int ldc,
                               long long c_stride, int count, int compute, int) {
  bool const wide = in_double(compute);
  return multiply(handle, m, n, k, scalar(alpha, wide),
                  {a, a_type, turn_a != kKeepRows, lda, a_stride},
                  {b, b_type, turn_b != kKeepRows, ldb, b_stride}, scalar(beta, wide),
                  {c, c_type, ldc, c_stride}, count);
}
int cublasGemmEx(Handle* handle, int turn_a, int turn_b, int m, int n, int k, const void* alpha,
                 const void* a, int a_type, int lda, const void* b, int b_type, int ldb,
                 const void* beta, void* c, int c_type, int ldc, int compute, int algorithm) {
  return cublasGemmStridedBatchedEx(handle, turn_a, turn_b, m, n, k, alpha, a, a_type, lda, 0, b,
                                    b_type, ldb, 0, beta, c, c_type, ldc, 0, 1, compute, algorithm);
}

#define STANDIN_GEMM(LETTER, TYPE, CODE, COMPUTE)                                                \
  int cublas##LETTER##gemmStridedBatched(                                                        \
      Handle* handle, int turn_a, int turn_b, int m, int n, int k, const TYPE* alpha,            \
      const TYPE* a, int lda, long long a_stride, const TYPE* b, int ldb, long long b_stride,    \
      const TYPE* beta, TYPE* c, int ldc, long long c_stride, int count) {                       \
    return cublasGemmStridedBatchedEx(handle, turn_a, turn_b, m, n, k, alpha, a, CODE, lda,      \
                                      a_stride, b, CODE, ldb, b_stride, beta, c, CODE, ldc,      \
                                      c_stride, count, COMPUTE, 0);                              \
  }                                                                                              \
  int cublas##LETTER##gemm_v2(Handle* handle, int turn_a, int turn_b, int m, int n, int k,       \
                              const TYPE* alpha, const TYPE* a, int lda, const TYPE* b, int ldb, \
                              const TYPE* beta, TYPE* c, int ldc) {                              \
    return cublas##LETTER##gemmStridedBatched(handle, turn_a, turn_b, m, n, k, alpha, a, lda, 0, \
                                              b, ldb, 0, beta, c, ldc, 0, 1);                    \
  }
STANDIN_GEMM(S, float, kFloat, 68)    // CUBLAS_COMPUTE_32F
STANDIN_GEMM(D, double, kDouble, 70)
}
