// Rotary positions, and their gradient.
#include "common.cuh"
#include "rotary.cuh"

namespace {

// A thread takes an element of the first half of a row and its partner in the second half. y may be
// the memory of x.
template <class F>
__device__ void rotate(Element* y, const Element* x, const Element* cos, const Element* sin,
                       const AngleRows& angles, Index rows, Index half, const F& f) {
  for (Index i = thread_index(); i < rows * half; i += thread_count()) {
    const Index row = i / half;
    const Index column = i % half;
    const Index first = row * 2 * half + column;
    const Index angle = angles.of(row) + column;
    const Real a = widen(x[first]), b = widen(x[first + half]);
    const Real c1 = widen(cos[angle]), c2 = widen(cos[angle + half]);
    const Real s1 = widen(sin[angle]), s2 = widen(sin[angle + half]);
    Real left, right;
    f(left, right, a, b, c1, c2, s1, s2);
    narrow(y + first, left);
    narrow(y + first + half, right);
  }
}

}  // namespace

extern "C" __global__ void rotary(Element* y, const Element* x, const Element* cos,
                                  const Element* sin, AngleRows angles, Index rows, Index half) {
  rotate(y, x, cos, sin, angles, rows, half,
         [](Real& left, Real& right, Real a, Real b, Real c1, Real c2, Real s1, Real s2) {
           left = a * c1 - b * s1;
           right = b * c2 + a * s2;
         });
}

extern "C" __global__ void rotary_grad(Element* y, const Element* x, const Element* cos,
                                       const Element* sin, AngleRows angles, Index rows,
                                       Index half) {
  rotate(y, x, cos, sin, angles, rows, half,
         [](Real& left, Real& right, Real a, Real b, Real c1, Real c2, Real s1, Real s2) {
           left = a * c1 + b * s2;
           right = b * c2 - a * s1;
         });
}
