// Standard operators that onnxruntime's CUDA provider lacks.
#include "common.cuh"
#include "standard.cuh"

namespace {

// f(x) -> y, which may be the same memory.
template <class F>
__device__ void elementwise(Element* y, const Element* x, Index n, const F& f) {
  const bool wide = aligned(y) && aligned(x);
  for_elements(n, wide, thread_index(), thread_count(), [&](Index i, auto lanes) {
    Real v[decltype(lanes)::kCount];
    load(v, x + i);
    for (Real& one : v) one = f(one);
    store(y + i, v);
  });
}

__device__ inline float less_one(float x) { return expm1f(x); }
__device__ inline double less_one(double x) { return expm1(x); }

// What a window without elements has: the lowest number of the type.
__device__ inline Real lowest() {
#if ONNXPAR_ELEMENT == 10
  return Real(-65504);
#elif ONNXPAR_ELEMENT == 11
  return Real(-1.7976931348623157e308);
#elif ONNXPAR_ELEMENT == 16
  return Real(-3.3895313892515355e38);
#else
  return Real(-3.4028234663852886e38);
#endif
}

}  // namespace

// Arguments that an operator does not have are not read.
#define ONNXPAR_ELEMENTWISE(name, value)                                                      \
  extern "C" __global__ void name(Element* y, const Element* x, Index n, double first,        \
                                  double second) {                                            \
    const Real alpha = static_cast<Real>(first), gamma = static_cast<Real>(second);           \
    elementwise(y, x, n, [=](Real v) -> Real {                                                \
      (void)alpha, (void)gamma;                                                               \
      return value;                                                                           \
    });                                                                                       \
  }
#if ONNXPAR_ELEMENT == 11
#define ONNXPAR_FUNCTION(name) ONNXPAR_ELEMENTWISE(elementwise_##name, name(v))
#else
#define ONNXPAR_FUNCTION(name) ONNXPAR_ELEMENTWISE(elementwise_##name, name##f(v))
#endif

ONNXPAR_FUNCTION(acos)
ONNXPAR_FUNCTION(acosh)
ONNXPAR_FUNCTION(asin)
ONNXPAR_FUNCTION(asinh)
ONNXPAR_FUNCTION(atan)
ONNXPAR_FUNCTION(atanh)
ONNXPAR_FUNCTION(cosh)
ONNXPAR_FUNCTION(sinh)
ONNXPAR_FUNCTION(tan)
ONNXPAR_ELEMENTWISE(elementwise_celu, v > Real(0) ? v : alpha * less_one(v / alpha))
ONNXPAR_ELEMENTWISE(elementwise_elu, v > Real(0) ? v : alpha * less_one(v))
ONNXPAR_ELEMENTWISE(elementwise_selu, gamma*(v > Real(0) ? v : alpha * less_one(v)))
ONNXPAR_ELEMENTWISE(elementwise_thresholded_relu, v > alpha ? v : Real(0))

// The first of the greatest elements of each window; no number is greater than any. Indices, if
// wanted, count the elements of all of x.
extern "C" __global__ void max_pool(Element* y, Index* indices, const Element* x, Window w,
                                    Index planes) {
  const Index plane_size = w.size[0] * w.size[1] * w.size[2];
  const Index plane_results = w.results[0] * w.results[1] * w.results[2];
  for (Index i = thread_index(); i < planes * plane_results; i += thread_count()) {
    Index place = i % plane_results;
    Index start[kSpace];
    for (int d = kSpace - 1; d >= 0; --d) {
      start[d] = place % w.results[d] * w.stride[d] - w.before[d];
      place /= w.results[d];
    }
    const Index plane = i / plane_results * plane_size;
    Real best = lowest();
    Index found = -1;
    for (Index a = 0; a < w.kernel[0]; ++a) {
      const Index at0 = start[0] + a * w.dilation[0];
      if (at0 < 0 || at0 >= w.size[0]) continue;
      for (Index b = 0; b < w.kernel[1]; ++b) {
        const Index at1 = start[1] + b * w.dilation[1];
        if (at1 < 0 || at1 >= w.size[1]) continue;
        for (Index c = 0; c < w.kernel[2]; ++c) {
          const Index at2 = start[2] + c * w.dilation[2];
          if (at2 < 0 || at2 >= w.size[2]) continue;
          const Index at = plane + (at0 * w.size[1] + at1) * w.size[2] + at2;
          const Real value = widen(x[at]);
          if (best != best || (found >= 0 && value <= best)) continue;
          best = value;
          found = at;
        }
      }
    }
    narrow(y + i, best);
    if (indices != nullptr) indices[i] = found;
  }
}
