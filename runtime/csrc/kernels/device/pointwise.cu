// Gradients of activations.
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

// d/dx x Phi(x) = Phi(x) + x phi(x), with the normal distribution Phi and its density phi.
struct GeluGrad {
  __device__ Real operator()(Real d, Real x) const {
    constexpr Real kInverseRoot2Pi = Real(0.39894228040143267794);
    // Beyond 40 the density is 0 in either type, and x^2 might be infinite.
    const Real w = x > Real(40) ? Real(40) : (x < Real(-40) ? Real(-40) : x);
    const Real bell = exponential(Real(-0.5) * w * w);
    const Real tail = upper_tail(w < Real(0) ? -w : w, bell);
    return d * ((w < Real(0) ? tail : Real(1) - tail) + w * bell * kInverseRoot2Pi);
  }
};

// Of 0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3). With p = 1 / (1 + exp(-2u)) and
// q = 1 - p, both computed without cancellation: 1 + tanh(u) = 2p and 1 - tanh(u)^2 = 4pq.
struct GeluTanhGrad {
  __device__ Real operator()(Real d, Real x) const {
    constexpr Real kRoot = Real(0.79788456080286535588);
    constexpr Real kCubic = Real(0.044715);
    // Beyond 8 (float32) or 20 the derivative is 0 or 1, and exp(2u) is still finite.
    constexpr Real kMost = sizeof(Real) == 4 ? Real(8) : Real(20);
    const Real w = x > kMost ? kMost : (x < -kMost ? -kMost : x);
    const Real square = w * w;
    const Real u = kRoot * w * (Real(1) + kCubic * square);
    const Real power = exponential(Real(2) * u);
    const Real q = Real(1) / (Real(1) + power);
    const Real p = power * q;
    const Real slope = kRoot * (Real(1) + Real(3) * kCubic * square);
    return d * (p * (Real(1) + Real(2) * w * q * slope));
  }
};

// Of x p with p = 1 / (1 + exp(-x)). With q = 1 - p, computed without cancellation, the derivative
// is p (1 + x q).
struct SiluGrad {
  __device__ Real operator()(Real d, Real x) const {
    // Beyond 40 the derivative differs from 0 or 1 by less than 2e-16, and exp(40) is finite.
    const Real w = x > Real(40) ? Real(40) : (x < Real(-40) ? Real(-40) : x);
    const Real power = exponential(w);
    const Real q = Real(1) / (Real(1) + power);
    return d * (power * q * (Real(1) + w * q));
  }
};

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
extern "C" __global__ void gelu_grad(Element* dx, const Element* dy, const Element* y, Index n) {
  pointwise(dx, dy, y, n, GeluGrad());
}
extern "C" __global__ void gelu_tanh_grad(Element* dx, const Element* dy, const Element* y,
                                          Index n) {
  pointwise(dx, dy, y, n, GeluTanhGrad());
}
extern "C" __global__ void silu_grad(Element* dx, const Element* dy, const Element* y, Index n) {
  pointwise(dx, dy, y, n, SiluGrad());
}
