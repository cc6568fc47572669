// Gradients of activations, and gated activations.
#include "common.cuh"

namespace {

// f(dy, y) -> dx. All three may be the same memory.
template <class F>
__device__ void pointwise(Element* dx, const Element* dy, const Element* y, Index n, const F& f) {
  const bool wide = aligned(dx) && aligned(dy) && aligned(y);
  for_elements(n, wide, thread_index(), thread_count(), [&](Index i, auto lanes) {
    constexpr int kWidth = decltype(lanes)::kCount;
    Real d[kWidth], v[kWidth];
    load(d, dy + i);
    load(v, y + i);
    for (int k = 0; k < kWidth; ++k) d[k] = f(d[k], v[k]);
    store(dx + i, d);
  });
}

struct ReluGrad {
  __device__ Real operator()(Real d, Real y) const { return y > Real(0) ? d : Real(0); }
};

struct TanhGrad {
  __device__ Real operator()(Real d, Real y) const { return d * (Real(1) - y * y); }
};

struct SigmoidGrad {
  __device__ Real operator()(Real d, Real y) const { return d * (y * (Real(1) - y)); }
};

// Phi(-x) of the normal distribution for x >= 0, where bell = exp(-x^2 / 2).
__device__ inline double upper_tail(double x, double) {
  return 0.5 * erfc(x * 0.70710678118654752440);
}
// With an error of at most 0.8e-7: C. Hastings, "Approximations for Digital Computers", 1955,
// sheet 43 (formula 7.1.26 of Abramowitz and Stegun), for x / sqrt(2). It needs no second exp.
__device__ inline float upper_tail(float x, float bell) {
  const float t = 1.0f / (1.0f + 0.3275911f * 0.70710678f * x);
  const float sum =
      ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t +
       0.254829592f) * t;
  return 0.5f * bell * sum;
}

// An activation and its derivative at one place.
struct Tangent {
  Real value;
  Real slope;
};

// The number, or the limit that it is beyond.
__device__ inline Real limited(Real x, Real most) {
  return x > most ? most : (x < -most ? -most : x);
}
// The number, or its limit if it is below: there an activation is 0, also for infinite numbers.
__device__ inline Real above(Real x, Real limit) { return x < limit ? limit : x; }

// x Phi(x) and Phi(x) + x phi(x), with the normal distribution Phi and its density phi.
struct Gelu {
  __device__ static Tangent at(Real x) {
    constexpr Real kInverseRoot2Pi = Real(0.39894228040143267794);
    // Beyond 40 the density is 0 in either type, and x^2 might be infinite.
    const Real w = limited(x, Real(40));
    const Real bell = exponential(Real(-0.5) * w * w);
    const Real tail = upper_tail(w < Real(0) ? -w : w, bell);
    const Real below = w < Real(0) ? tail : Real(1) - tail;
    return {above(x, w) * below, below + w * bell * kInverseRoot2Pi};
  }
};

// 0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3). With p = 1 / (1 + exp(-2u)) and
// q = 1 - p, both computed without cancellation: 1 + tanh(u) = 2p and 1 - tanh(u)^2 = 4pq.
struct GeluTanh {
  __device__ static Tangent at(Real x) {
    constexpr Real kRoot = Real(0.79788456080286535588);
    constexpr Real kCubic = Real(0.044715);
    // Beyond 8 (float32) or 20 the derivative is 0 or 1, and exp(2u) is still finite.
    constexpr Real kMost = sizeof(Real) == 4 ? Real(8) : Real(20);
    const Real w = limited(x, kMost);
    const Real square = w * w;
    const Real u = kRoot * w * (Real(1) + kCubic * square);
    const Real power = exponential(Real(2) * u);
    const Real q = Real(1) / (Real(1) + power);
    const Real p = power * q;
    const Real slope = kRoot * (Real(1) + Real(3) * kCubic * square);
    return {above(x, w) * p, p * (Real(1) + Real(2) * w * q * slope)};
  }
};

// x p with p = 1 / (1 + exp(-x)). With q = 1 - p, computed without cancellation, the derivative is
// p (1 + x q).
struct Silu {
  __device__ static Tangent at(Real x) {
    // Beyond 40 the derivative differs from 0 or 1 by less than 2e-16, and exp(40) is finite.
    const Real w = limited(x, Real(40));
    const Real power = exponential(w);
    const Real q = Real(1) / (Real(1) + power);
    const Real p = power * q;
    return {above(x, w) * p, p * (Real(1) + w * q)};
  }
};

template <class Activation>
struct ActivationGrad {
  __device__ Real operator()(Real d, Real x) const { return d * Activation::at(x).slope; }
};

template <class Activation>
struct GatedBy {
  __device__ Real operator()(Real gate, Real up) const { return Activation::at(gate).value * up; }
};

// dgate may be the memory of dy, and dup that of `up`.
template <class Activation>
__device__ void gated_grad(Element* dgate, Element* dup, const Element* dy, const Element* gate,
                           const Element* up, Index n) {
  const bool wide =
      aligned(dgate) && aligned(dup) && aligned(dy) && aligned(gate) && aligned(up);
  for_elements(n, wide, thread_index(), thread_count(), [&](Index i, auto lanes) {
    constexpr int kWidth = decltype(lanes)::kCount;
    Real d[kWidth], v[kWidth], g[kWidth];
    load(d, dy + i);
    load(v, gate + i);
    load(g, up + i);
    for (int k = 0; k < kWidth; ++k) {
      const Tangent of = Activation::at(v[k]);
      g[k] *= d[k] * of.slope;
      d[k] *= of.value;
    }
    store(dgate + i, g);
    store(dup + i, d);
  });
}

}  // namespace

extern "C" __global__ void relu_grad(Element* dx, const Element* dy, const Element* y, Index n) {
  pointwise(dx, dy, y, n, ReluGrad());
}
extern "C" __global__ void tanh_grad(Element* dx, const Element* dy, const Element* y, Index n) {
  pointwise(dx, dy, y, n, TanhGrad());
}
extern "C" __global__ void sigmoid_grad(Element* dx, const Element* dy, const Element* y,
                                        Index n) {
  pointwise(dx, dy, y, n, SigmoidGrad());
}

#define ONNXPAR_ACTIVATION(name, Activation)                                                     \
  extern "C" __global__ void name##_grad(Element* dx, const Element* dy, const Element* x,       \
                                         Index n) {                                              \
    pointwise(dx, dy, x, n, ActivationGrad<Activation>());                                       \
  }                                                                                              \
  extern "C" __global__ void gated_##name(Element* y, const Element* gate, const Element* up,     \
                                          Index n) {                                             \
    pointwise(y, gate, up, n, GatedBy<Activation>());                                            \
  }                                                                                              \
  extern "C" __global__ void gated_##name##_grad(Element* dgate, Element* dup, const Element* dy, \
                                                 const Element* gate, const Element* up,          \
                                                 Index n) {                                      \
    gated_grad<Activation>(dgate, dup, dy, gate, up, n);                                           \
  }

ONNXPAR_ACTIVATION(gelu, Gelu)
ONNXPAR_ACTIVATION(gelu_tanh, GeluTanh)
ONNXPAR_ACTIVATION(silu, Silu)
