// Compiled more than once; ONNXPAR_SIMD names the instruction set, which is also the namespace.
#include "kernels/host/simd.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

namespace onnxpar {
namespace ONNXPAR_SIMD {
namespace {

// What differs between the element types in exp.
template <class T>
struct Real;
template <>
struct Real<float> {
  using Bits = uint32_t;
  static constexpr int kMantissa = 23;
  static constexpr Bits kBias = 127;
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float kLn2High = 0.693359375f;
  static constexpr float kLn2Low = -2.12194440e-4f;
  static constexpr float kLowest = -87.3f;  // below it the result would be subnormal
  static constexpr float kHighest = 88.0f;
  static constexpr int kDegree = 7;  // ln(2)/2 ^ 8 / 8! is 5e-9
};
template <>
struct Real<double> {
  using Bits = uint64_t;
  static constexpr int kMantissa = 52;
  static constexpr Bits kBias = 1023;
  static constexpr double kRound = 6755399441055744.0;
  static constexpr double kLn2High = 0.693147180369123816490;
  static constexpr double kLn2Low = 1.90821492927058770002e-10;
  static constexpr double kLowest = -708.3;
  static constexpr double kHighest = 709.0;
  static constexpr int kDegree = 13;  // ln(2)/2 ^ 14 / 14! is 4e-18
};

// Taylor's coefficients 1/k!.
constexpr double kInverseFactorial[] = {1.0,
                                        1.0,
                                        1.0 / 2,
                                        1.0 / 6,
                                        1.0 / 24,
                                        1.0 / 120,
                                        1.0 / 720,
                                        1.0 / 5040,
                                        1.0 / 40320,
                                        1.0 / 362880,
                                        1.0 / 3628800,
                                        1.0 / 39916800,
                                        1.0 / 479001600,
                                        1.0 / 6227020800.0};

// exp(x) to about two units in the last place; 0 where it would be subnormal, and arguments above
// kHighest count as that. exp(x) = 2^n exp(r) with n = round(x / ln 2), |r| <= ln(2) / 2.
template <class T>
inline __attribute__((always_inline)) T exponential(T x) {
  using R = Real<T>;
  const T limited = x > R::kHighest ? R::kHighest : x;
  const T shifted = limited * static_cast<T>(1.44269504088896340736) + R::kRound;
  const T n = shifted - R::kRound;
  const T r = (limited - n * R::kLn2High) - n * R::kLn2Low;
  T p = static_cast<T>(kInverseFactorial[R::kDegree]);
#pragma GCC unroll 16
  for (int k = R::kDegree - 1; k >= 0; --k) p = p * r + static_cast<T>(kInverseFactorial[k]);
  // The integer stands in the low bits of `shifted`; the others are shifted out.
  typename R::Bits bits;
  memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits << R::kMantissa) + (R::kBias << R::kMantissa);
  T scale;
  memcpy(&scale, &bits, sizeof(scale));
  return x < R::kLowest ? T(0) : p * scale;
}

template <class T>
inline __attribute__((always_inline)) T root(T x) {
  if constexpr (sizeof(T) == 4) return sqrtf(x);
  else return sqrt(x);
}

template <class T>
T logarithm(T x) {
  if constexpr (sizeof(T) == 4) return logf(x);
  else return log(x);
}

// exp(z^2) erfc(z) for z >= 0: a polynomial in (z - 3) / (z + 3), fitted for least relative error,
// 3.2e-8 for z <= 10, beyond which what it is multiplied with is 0 in float32.
inline __attribute__((always_inline)) float scaled_erfc(float z) {
  const float s = (z - 3.0f) / (z + 3.0f);
  float p = -6.89957013e-05f;
  p = p * s - 5.89449803e-04f;
  p = p * s + 7.90367202e-04f;
  p = p * s + 4.28087804e-03f;
  p = p * s - 2.44149131e-02f;
  p = p * s + 7.16627952e-02f;
  p = p * s - 1.50113451e-01f;
  p = p * s + 2.45603963e-01f;
  p = p * s - 3.26233639e-01f;
  return p * s + 1.79001151e-01f;
}

template <class T>
void add(T* to, const T* from, size_t n) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) to[i] += from[i];
}

// f(dy, y) -> dx.
template <class T, class F>
inline __attribute__((always_inline)) void pointwise(T* dx, const T* dy, const T* y, size_t n,
                                                     const F& f) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) dx[i] = f(dy[i], y[i]);
}

template <class T>
void relu_grad(T* dx, const T* dy, const T* y, size_t n) {
  // d is read whether needed or not: a blend is faster than a masked read.
  pointwise(dx, dy, y, n, [](T d, T v) { return v > T(0) ? d : T(0); });
}

template <class T>
void tanh_grad(T* dx, const T* dy, const T* y, size_t n) {
  pointwise(dx, dy, y, n, [](T d, T v) { return d * (T(1) - v * v); });
}

template <class T>
void sigmoid_grad(T* dx, const T* dy, const T* y, size_t n) {
  pointwise(dx, dy, y, n, [](T d, T v) { return d * (v * (T(1) - v)); });
}

// An activation and its derivative at one place.
template <class T>
struct Tangent {
  T value;
  T slope;
};

// The number, or the limit that it is beyond.
template <class T>
inline __attribute__((always_inline)) T limited(T v, T most) {
  return v > most ? most : (v < -most ? -most : v);
}
// The number, or its limit if it is below: there an activation is 0, also for infinite numbers.
template <class T>
inline __attribute__((always_inline)) T above(T v, T limit) {
  return v < limit ? limit : v;
}

// x Phi(x) and Phi(x) + x phi(x), with the normal distribution Phi and its density phi.
struct Gelu {
  template <class T>
  static inline __attribute__((always_inline)) Tangent<T> at(T v) {
    constexpr T kInverseRoot2 = static_cast<T>(0.70710678118654752440);
    constexpr T kInverseRoot2Pi = static_cast<T>(0.39894228040143267794);
    // Beyond 40 the density is 0 in either type.
    const T w = limited(v, T(40));
    const T gauss = exponential(T(-0.5) * w * w);
    T below;
    if constexpr (sizeof(T) == 4) {
      const T magnitude = w < T(0) ? -w : w;
      const T tail = T(0.5) * gauss * scaled_erfc(magnitude * kInverseRoot2);
      below = w < T(0) ? tail : T(1) - tail;
    } else {
      below = T(0.5) * erfc(-w * kInverseRoot2);
    }
    return {above(v, w) * below, below + w * gauss * kInverseRoot2Pi};
  }
};

// 0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3). With p = 1 / (1 + exp(-2u)) and
// q = 1 - p, both computed without cancellation: 1 + tanh(u) = 2p and 1 - tanh(u)^2 = 4pq.
struct GeluTanh {
  template <class T>
  static inline __attribute__((always_inline)) Tangent<T> at(T v) {
    constexpr T kRoot = static_cast<T>(0.79788456080286535588);
    constexpr T kCubic = static_cast<T>(0.044715);
    // Beyond 30 the derivative is 0 or 1 in either type, and v^3 might overflow.
    const T w = limited(v, T(30));
    const T square = w * w;
    const T u = kRoot * w * (T(1) + kCubic * square);
    const T power = exponential(T(2) * u);
    const T q = T(1) / (T(1) + power);
    const T p = power * q;
    const T slope = kRoot * (T(1) + T(3) * kCubic * square);
    return {above(v, w) * p, p * (T(1) + T(2) * w * q * slope)};
  }
};

// x p with p = 1 / (1 + exp(-x)). With q = 1 - p, computed without cancellation, the derivative is
// p (1 + x q).
struct Silu {
  template <class T>
  static inline __attribute__((always_inline)) Tangent<T> at(T v) {
    // Beyond 40 the derivative differs from 0 or 1 by less than 2e-16, and exp(40) is finite.
    const T w = limited(v, T(40));
    const T power = exponential(w);
    const T q = T(1) / (T(1) + power);
    const T p = power * q;
    return {above(v, w) * p, p * (T(1) + w * q)};
  }
};

template <class Activation, class T>
inline __attribute__((always_inline)) void activation_grad(T* dx, const T* dy, const T* x,
                                                           size_t n) {
  pointwise(dx, dy, x, n, [](T d, T v) { return d * Activation::at(v).slope; });
}

template <class Activation, class T>
inline __attribute__((always_inline)) void gated_grad(T* dgate, T* dup, const T* dy, const T* gate,
                                                      const T* up, size_t n) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    const T d = dy[i];
    const Tangent<T> of = Activation::at(gate[i]);
    dgate[i] = d * up[i] * of.slope;
    dup[i] = d * of.value;
  }
}

template <class Activation, class T>
inline __attribute__((always_inline)) void gated(T* y, const T* gate, const T* up, size_t n) {
  pointwise(y, gate, up, n, [](T g, T u) { return Activation::at(g).value * u; });
}

#define ONNXPAR_ACTIVATION(name, Activation)                                                    \
  template <class T>                                                                            \
  void name##_grad(T* dx, const T* dy, const T* x, size_t n) {                                  \
    activation_grad<Activation>(dx, dy, x, n);                                                  \
  }                                                                                             \
  template <class T>                                                                            \
  void gated_##name(T* y, const T* gate, const T* up, size_t n) {                               \
    gated<Activation>(y, gate, up, n);                                                          \
  }                                                                                             \
  template <class T>                                                                            \
  void gated_##name##_grad(T* dgate, T* dup, const T* dy, const T* gate, const T* up, size_t n) { \
    gated_grad<Activation>(dgate, dup, dy, gate, up, n);                                        \
  }

ONNXPAR_ACTIVATION(gelu, Gelu)
ONNXPAR_ACTIVATION(gelu_tanh, GeluTanh)
ONNXPAR_ACTIVATION(silu, Silu)

// Sums are taken in blocks, so that their error does not grow with the length of a row: a float32
// sum of 50,000 probabilities would lose 6 of its 24 bits.
constexpr size_t kBlock = 256;

// The sum of term(i) for all i below n.
template <class T, class Term>
inline __attribute__((always_inline)) T blocked_sum(size_t n, const Term& term) {
  T total = 0;
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t end = n - begin < kBlock ? n : begin + kBlock;
    T part = 0;
#pragma omp simd reduction(+ : part)
    for (size_t i = begin; i < end; ++i) part += term(i);
    total += part;
  }
  return total;
}

// totals[j] = the sum of term(i, j) for all i below n.
template <class T, class Term>
inline __attribute__((always_inline)) void blocked_column_sums(T* __restrict totals, size_t n,
                                                               size_t columns, const Term& term) {
  T part[kColumns];
  for (size_t j = 0; j < columns; ++j) totals[j] = 0;
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t end = n - begin < kBlock ? n : begin + kBlock;
    for (size_t j = 0; j < columns; ++j) part[j] = 0;
    for (size_t i = begin; i < end; ++i) {
#pragma omp simd
      for (size_t j = 0; j < columns; ++j) part[j] += term(i, j);
    }
    for (size_t j = 0; j < columns; ++j) totals[j] += part[j];
  }
}

template <class T>
void softmax_grad(T* dx, const T* dy, const T* y, size_t n) {
  const T sum = blocked_sum<T>(n, [=](size_t i) { return dy[i] * y[i]; });
#pragma omp simd
  for (size_t i = 0; i < n; ++i) dx[i] = y[i] * (dy[i] - sum);
}

template <class T>
void log_softmax_grad(T* dx, const T* dy, const T* y, size_t n) {
  const T sum = blocked_sum<T>(n, [=](size_t i) { return dy[i]; });
#pragma omp simd
  for (size_t i = 0; i < n; ++i) dx[i] = dy[i] - exponential(y[i]) * sum;
}

template <class T>
void softmax_grad_columns(T* dx, const T* dy, const T* y, size_t n, size_t stride,
                          size_t columns) {
  T sums[kColumns];
  blocked_column_sums(sums, n, columns, [=](size_t i, size_t j) {
    return dy[i * stride + j] * y[i * stride + j];
  });
  for (size_t i = 0; i < n; ++i) {
    const size_t at = i * stride;
#pragma omp simd
    for (size_t j = 0; j < columns; ++j) dx[at + j] = y[at + j] * (dy[at + j] - sums[j]);
  }
}

template <class T>
void log_softmax_grad_columns(T* dx, const T* dy, const T* y, size_t n, size_t stride,
                              size_t columns) {
  T sums[kColumns];
  blocked_column_sums(sums, n, columns, [=](size_t i, size_t j) { return dy[i * stride + j]; });
  for (size_t i = 0; i < n; ++i) {
    const size_t at = i * stride;
#pragma omp simd
    for (size_t j = 0; j < columns; ++j) {
      dx[at + j] = dy[at + j] - exponential(y[at + j]) * sums[j];
    }
  }
}

template <class T>
void log_sum_exp(T* most_out, T* log_sum, const T* x, size_t n) {
  T most = x[0];
#pragma omp simd reduction(max : most)
  for (size_t i = 1; i < n; ++i) most = x[i] > most ? x[i] : most;
  *log_sum = logarithm(blocked_sum<T>(n, [=](size_t i) { return exponential(x[i] - most); }));
  *most_out = most;
}

template <class T>
void log_sum_exp_columns(T* __restrict most, T* __restrict log_sum, const T* x, size_t n,
                         size_t stride, size_t columns) {
  for (size_t j = 0; j < columns; ++j) most[j] = x[j];
  for (size_t i = 1; i < n; ++i) {
    const T* row = x + i * stride;
#pragma omp simd
    for (size_t j = 0; j < columns; ++j) most[j] = row[j] > most[j] ? row[j] : most[j];
  }
  blocked_column_sums(log_sum, n, columns, [=](size_t i, size_t j) {
    return exponential(x[i * stride + j] - most[j]);
  });
  for (size_t j = 0; j < columns; ++j) log_sum[j] = logarithm(log_sum[j]);
}

template <class T>
void log_softmax(T* y, const T* x, T most, T log_sum, size_t n) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) y[i] = (x[i] - most) - log_sum;
}

template <class T>
void log_softmax_each(T* y, const T* x, const T* most, const T* log_sum, size_t n) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) y[i] = (x[i] - most[i]) - log_sum[i];
}

template <class T>
void scaled_exp(T* dx, const T* y, T factor, size_t n) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) dx[i] = factor * exponential(y[i]);
}

template <class T>
void scaled_exp_each(T* dx, const T* y, const T* factors, size_t n) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) dx[i] = factors[i] * exponential(y[i]);
}

// With h = (x - mean) inv_std and w = dy scale: dx = inv_std (w - mean(w) - h mean(w h)). If
// nothing is centred, mean and mean(w) count as 0.
template <bool kCentred, class T>
inline __attribute__((always_inline)) void norm_grad(T* dx, T* __restrict dscale,
                                                     T* __restrict dbias, const T* dy, const T* x,
                                                     const T* scale, T mean, T inv_std, size_t n) {
  T sum = 0;
  T dot = 0;
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t end = n - begin < kBlock ? n : begin + kBlock;
    T sum_part = 0;
    T dot_part = 0;
#pragma omp simd reduction(+ : sum_part, dot_part)
    for (size_t i = begin; i < end; ++i) {
      const T h = (kCentred ? x[i] - mean : x[i]) * inv_std;
      const T w = dy[i] * scale[i];
      if (kCentred) sum_part += w;
      dot_part += w * h;
    }
    sum += sum_part;
    dot += dot_part;
  }
  sum /= static_cast<T>(n);
  dot /= static_cast<T>(n);
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    const T h = (kCentred ? x[i] - mean : x[i]) * inv_std;
    const T d = dy[i];
    dscale[i] += d * h;
    if (kCentred) dbias[i] += d;
    dx[i] = inv_std * (d * scale[i] - sum - h * dot);
  }
}

template <class T>
void layer_norm_grad(T* dx, T* dscale, T* dbias, const T* dy, const T* x, const T* scale, T mean,
                     T inv_std, size_t n) {
  norm_grad<true>(dx, dscale, dbias, dy, x, scale, mean, inv_std, n);
}

template <class T>
void rms_norm_grad(T* dx, T* dscale, T* dbias, const T* dy, const T* x, const T* scale, T mean,
                   T inv_std, size_t n) {
  norm_grad<false>(dx, dscale, dbias, dy, x, scale, mean, inv_std, n);
}

// Both halves of a row are turned: (a, b) becomes (a cos - b sin, b cos + a sin), where each element
// has its own angle. The gradient is the transposed matrix.
template <class T>
void rotary(T* y, const T* x, const T* cos, const T* sin, size_t half) {
#pragma omp simd
  for (size_t i = 0; i < half; ++i) {
    const T a = x[i], b = x[half + i];
    y[i] = a * cos[i] - b * sin[i];
    y[half + i] = b * cos[half + i] + a * sin[half + i];
  }
}

template <class T>
void rotary_grad(T* y, const T* x, const T* cos, const T* sin, size_t half) {
#pragma omp simd
  for (size_t i = 0; i < half; ++i) {
    const T a = x[i], b = x[half + i];
    y[i] = a * cos[i] + b * sin[half + i];
    y[half + i] = b * cos[half + i] - a * sin[i];
  }
}

template <class T>
void channel_sums(T* total, T* along, const T* dy, const T* x, T mean, size_t n) {
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t end = n - begin < kBlock ? n : begin + kBlock;
    T sum = 0;
    T dot = 0;
#pragma omp simd reduction(+ : sum, dot)
    for (size_t i = begin; i < end; ++i) {
      sum += dy[i];
      dot += dy[i] * (x[i] - mean);
    }
    *total += sum;
    *along += dot;
  }
}

template <class T>
T centred_square_sum(const T* x, T mean, size_t n) {
  return blocked_sum<T>(n, [=](size_t i) { return (x[i] - mean) * (x[i] - mean); });
}

template <class T>
void batch_norm_grad(T* dx, const T* dy, const T* x, T mean, T mean_dy, T bend, T step, size_t n) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) dx[i] = step * (dy[i] - mean_dy - (x[i] - mean) * bend);
}

// In several sums side by side: one would wait for each of its additions.
template <class T>
double square_sum(const T* x, size_t n) {
  constexpr size_t kSums = 16;
  double sums[kSums] = {};
  size_t i = 0;
  for (; i + kSums <= n; i += kSums) {
#pragma omp simd
    for (size_t j = 0; j < kSums; ++j) {
      const double v = x[i + j];
      sums[j] += v * v;
    }
  }
  double sum = 0;
  for (; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
  for (double part : sums) sum += part;
  return sum;
}

template <class T>
void sgd_step(T* const* to, const T* const* from, const StepScalars<T>& scalars, size_t n) {
  T* p_out = to[0];
  const T *p = from[0], *g = from[1];
  const StepScalars<T> s = scalars;
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    p_out[i] = p[i] - s.learning * (s.scale * g[i] + s.weight_decay * p[i]);
  }
}

template <class T>
void momentum_step(T* const* to, const T* const* from, const StepScalars<T>& scalars, size_t n) {
  T *p_out = to[0], *m_out = to[1];
  const T *p = from[0], *g = from[1], *m = from[2];
  const StepScalars<T> s = scalars;
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    const T gradient = s.scale * g[i] + s.weight_decay * p[i];
    const T moment = s.keep1 * m[i] + s.take1 * gradient;
    m_out[i] = moment;
    p_out[i] = p[i] - s.learning * moment;
  }
}

template <class T>
void adam_step(T* const* to, const T* const* from, const StepScalars<T>& scalars, size_t n) {
  T *p_out = to[0], *m_out = to[1], *v_out = to[2];
  const T *p = from[0], *g = from[1], *m = from[2], *v = from[3];
  const StepScalars<T> s = scalars;
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    const T gradient = s.scale * g[i] + s.weight_decay * p[i];
    const T first = s.keep1 * m[i] + s.take1 * gradient;
    const T second = s.keep2 * v[i] + s.take2 * (gradient * gradient);
    m_out[i] = first;
    v_out[i] = second;
    p_out[i] = s.decay * p[i] - s.learning * (first / (root(second) + s.eps));
  }
}

#include "kernels/host/tiles.h"

template <class T>
constexpr Loops<T> loops() {
  return {relu_grad<T>,
          tanh_grad<T>,
          sigmoid_grad<T>,
          gelu_grad<T>,
          gelu_tanh_grad<T>,
          silu_grad<T>,
          gated_gelu<T>,
          gated_gelu_tanh<T>,
          gated_silu<T>,
          gated_gelu_grad<T>,
          gated_gelu_tanh_grad<T>,
          gated_silu_grad<T>,
          softmax_grad<T>,
          log_softmax_grad<T>,
          softmax_grad_columns<T>,
          log_softmax_grad_columns<T>,
          log_sum_exp<T>,
          log_sum_exp_columns<T>,
          log_softmax<T>,
          log_softmax_each<T>,
          scaled_exp<T>,
          scaled_exp_each<T>,
          pack<T>,
          product<T>,
          softmax_scores<T>,
          layer_norm_grad<T>,
          rms_norm_grad<T>,
          rotary<T>,
          rotary_grad<T>,
          channel_sums<T>,
          centred_square_sum<T>,
          batch_norm_grad<T>,
          add<T>,
          square_sum<T>,
          sgd_step<T>,
          momentum_step<T>,
          adam_step<T>};
}

}  // namespace

const Simd table = {loops<float>(), loops<double>()};

}  // namespace ONNXPAR_SIMD
}  // namespace onnxpar
