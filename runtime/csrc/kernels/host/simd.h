// Inner loops of the training kernels. They are compiled once for any processor and, on x86-64,
// once more for AVX2; which of the two runs is decided when the library is first used.
//
// Every output may be the same memory as an input of the same element type (exactly the same, not
// shifted), unless stated otherwise. No loop allocates, throws or uses the C++ library, so that no
// inline function compiled for AVX2 can be taken for the one that all processors run.
#pragma once

#include <cstddef>

namespace onnxpar {

// The most columns of a reduction over a dim that is not the last that a loop takes together.
inline constexpr size_t kColumns = 256;

// Elements that a packed matrix [k, n] takes: n is rounded up to 64 bytes.
template <class T>
constexpr size_t packed_size(size_t k, size_t n) {
  constexpr size_t kWidth = 64 / sizeof(T);
  return k * ((n + kWidth - 1) / kWidth * kWidth);
}

// What an optimizer step needs besides tensors; see kernels/operators.h.
template <class T>
struct StepScalars {
  T scale;         // multiplies the gradient before all else
  T learning;      // learning rate, with Adam's corrections in it
  T weight_decay;  // times the parameter, added to the gradient
  T decay;         // times the parameter, before the step
  T keep1;         // what stays of the first moment, and the share of the gradient that comes
  T take1;
  T keep2;  // the same of the second
  T take2;
  T eps;  // times the root of the second moment's correction
};

template <class T>
using GradLoop = void (*)(T* dx, const T* dy, const T* y, size_t n);
template <class T>
using GateLoop = void (*)(T* dgate, T* dup, const T* dy, const T* gate, const T* up, size_t n);
template <class T>
using ColumnLoop = void (*)(T* dx, const T* dy, const T* y, size_t n, size_t stride,
                            size_t columns);
// One row of n elements: writes dx, adds to dscale and, if the row is centred, to dbias, which overlap
// no other array.
template <class T>
using NormLoop = void (*)(T* dx, T* dscale, T* dbias, const T* dy, const T* x, const T* scale,
                          T mean, T inv_std, size_t n);
// One row of rotary positions, of `half` pairs, or its gradient.
template <class T>
using RotaryLoop = void (*)(T* y, const T* x, const T* cos, const T* sin, size_t half);
template <class T>
using StepLoop = void (*)(T* const* to, const T* const* from, const StepScalars<T>& s, size_t n);

template <class T>
struct Loops {
  GradLoop<T> relu_grad;
  GradLoop<T> tanh_grad;
  GradLoop<T> sigmoid_grad;
  // Of x, not y. Error in float32 below 1e-6 |dy| (the derivative lies between -0.13 and 1.13).
  GradLoop<T> gelu_grad;
  GradLoop<T> gelu_tanh_grad;
  GradLoop<T> silu_grad;
  // The activation of the first operand times the second one.
  GradLoop<T> gated_gelu;
  GradLoop<T> gated_gelu_tanh;
  GradLoop<T> gated_silu;
  GateLoop<T> gated_gelu_grad;
  GateLoop<T> gated_gelu_tanh_grad;
  GateLoop<T> gated_silu_grad;

  // One row of a softmax or its logarithm.
  GradLoop<T> softmax_grad;
  GradLoop<T> log_softmax_grad;
  // Up to kColumns softmaxes side by side: element i of each is at i * stride.
  ColumnLoop<T> softmax_grad_columns;
  ColumnLoop<T> log_softmax_grad_columns;
  // The greatest of n elements and log(sum(exp(x - most))), apart since their sum would round; the
  // same for up to kColumns columns, whose element i is at i * stride.
  void (*log_sum_exp)(T* most, T* log_sum, const T* x, size_t n);
  void (*log_sum_exp_columns)(T* most, T* log_sum, const T* x, size_t n, size_t stride,
                              size_t columns);
  // y[i] = (x[i] - most) - log_sum, and the same with one of either for each element.
  void (*log_softmax)(T* y, const T* x, T most, T log_sum, size_t n);
  void (*log_softmax_each)(T* y, const T* x, const T* most, const T* log_sum, size_t n);
  // dx[i] = factor * exp(y[i]), and the same with a factor for each element.
  void (*scaled_exp)(T* dx, const T* y, T factor, size_t n);
  void (*scaled_exp_each)(T* dx, const T* y, const T* factors, size_t n);

  // Copies B [k, n], whose elements are `row` and `column` apart, for `product`: packed_size(k, n)
  // elements.
  void (*pack)(T* to, const T* b, size_t row, size_t column, size_t k, size_t n);
  // C [m, n] = A B, or C += A B with `add`. Rows of C are `c_row` apart; the element (i, p) of A is at
  // i * a_row + p * a_column. B was packed with `packed_k` rows, of which `packed` points to the
  // first that is used.
  void (*product)(T* c, size_t c_row, const T* a, size_t a_row, size_t a_column, const T* packed,
                  size_t packed_k, size_t m, size_t n, size_t k, bool add);
  // One row: x = softmax(scale x + bias). The bias has n elements, or one if `bias_step` is 0.
  void (*softmax_scores)(T* x, const T* bias, size_t bias_step, T scale, size_t n);

  NormLoop<T> layer_norm_grad;
  NormLoop<T> rms_norm_grad;  // neither `mean` nor `dbias` is read

  RotaryLoop<T> rotary;
  RotaryLoop<T> rotary_grad;

  // A channel of a batch normalisation. Adds the sums of dy and of dy (x - mean) to two numbers;
  // the sum of (x - mean)^2; dx = step (dy - mean_dy - (x - mean) bend).
  void (*channel_sums)(T* total, T* along, const T* dy, const T* x, T mean, size_t n);
  T (*centred_square_sum)(const T* x, T mean, size_t n);
  void (*batch_norm_grad)(T* dx, const T* dy, const T* x, T mean, T mean_dy, T bend, T step,
                          size_t n);

  // to[i] += from[i]
  void (*add)(T* to, const T* from, size_t n);
  double (*square_sum)(const T* x, size_t n);

  // `to` are p and the moments, `from` p, g and the moments.
  StepLoop<T> sgd_step;
  StepLoop<T> momentum_step;
  StepLoop<T> adam_step;
};

struct Simd {
  Loops<float> f32;
  Loops<double> f64;

  template <class T>
  const Loops<T>& of() const;
};
template <>
inline const Loops<float>& Simd::of<float>() const { return f32; }
template <>
inline const Loops<double>& Simd::of<double>() const { return f64; }

namespace simd_generic {
extern const Simd table;
}
namespace simd_avx2 {
extern const Simd table;
}

// The loops for this processor.
const Simd& simd();

// One of the loops, for either type.
template <template <class> class Loop>
struct Choice {
  Loop<float> Loops<float>::*f32;
  Loop<double> Loops<double>::*f64;
  template <class T>
  Loop<T> of() const {
    if constexpr (sizeof(T) == sizeof(float)) return simd().f32.*f32;
    else return simd().f64.*f64;
  }
};
#define ONNXPAR_CHOICE(name) {&Loops<float>::name, &Loops<double>::name}

}  // namespace onnxpar
