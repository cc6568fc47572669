// What the device kernels share: element types, wide loads, sums over a team of threads.
//
// Each source is compiled once for each element type that is used, by NVRTC at run time:
// ONNXPAR_ELEMENT is the type's number in ONNX. No CUDA header is read. What is taken from the
// compiler is as little as a host compiler can be taught in a page, so that the tests can run these
// very sources without a GPU.
//
// Sums have an order of their own that depends on shapes alone, never on the device or on timing:
// results are the same in every run. Nothing is added by atomic operations.
#pragma once

#include "types.cuh"

using namespace onnxpar::cuda;

// The numbers of ONNX's element types.
constexpr int kFloat32 = 1;
constexpr int kFloat16 = 10;
constexpr int kFloat64 = 11;

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(Half x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  return host_half_to_float(x.bits);
#endif
}
__device__ inline float widen(Bfloat x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}

// To nearest, ties to even.
__device__ inline void narrow(float* to, float x) { *to = x; }
__device__ inline void narrow(double* to, double x) { *to = x; }
__device__ inline void narrow(Half* to, float x) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(x));
#else
  to->bits = host_float_to_half(x);
#endif
}
__device__ inline void narrow(Bfloat* to, float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to->bits) : "f"(x));
#else
  const unsigned bits = __float_as_uint(x);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const unsigned rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  to->bits = static_cast<unsigned short>((nan ? bits | 0x400000u : rounded) >> 16);
#endif
}

// Element i of an array of any float type, given by its ONNX number.
template <class T = double>
__device__ inline T load_any(const void* from, int type, Index i) {
  if (type == kFloat32) return static_cast<T>(static_cast<const float*>(from)[i]);
  if (type == kFloat64) return static_cast<T>(static_cast<const double*>(from)[i]);
  if (type == kFloat16) return static_cast<T>(widen(static_cast<const Half*>(from)[i]));
  return static_cast<T>(widen(static_cast<const Bfloat*>(from)[i]));
}

// Functions of the standard library by the type of their argument.
__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }
__device__ inline float root(float x) { return sqrtf(x); }
__device__ inline double root(double x) { return sqrt(x); }

// As many elements as one access of 16 bytes moves, the widest there is.
constexpr int kPack = 16 / static_cast<int>(sizeof(Element));
template <int kWidth>
struct alignas(sizeof(Element) * kWidth) Pack {
  Element at[kWidth];
};

template <int kWidth>
__device__ inline void load(Real (&to)[kWidth], const Element* from) {
  const Pack<kWidth> pack = *reinterpret_cast<const Pack<kWidth>*>(from);
  for (int k = 0; k < kWidth; ++k) to[k] = widen(pack.at[k]);
}
template <int kWidth>
__device__ inline void store(Element* to, const Real (&from)[kWidth]) {
  Pack<kWidth> pack;
  for (int k = 0; k < kWidth; ++k) narrow(&pack.at[k], from[k]);
  *reinterpret_cast<Pack<kWidth>*>(to) = pack;
}

__device__ inline bool aligned(const void* pointer) {
  return reinterpret_cast<unsigned long long>(pointer) % 16 == 0;
}

template <int kWidth>
struct Lanes {
  static constexpr int kCount = kWidth;
};

// Calls f(i, Lanes<w>) for pieces of w elements from i on that together are all below n: packs
// where `wide`, and what is left one by one. `index` is this thread's number out of `step`.
template <class F>
__device__ inline void for_elements(Index n, bool wide, Index index, Index step, const F& f) {
  Index done = 0;
  if (wide) {
    done = n / kPack * kPack;
    for (Index i = index * kPack; i < done; i += step * kPack) f(i, Lanes<kPack>());
  }
  for (Index i = done + index; i < n; i += step) f(i, Lanes<1>());
}

__device__ inline Index thread_index() {
  return static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ inline Index thread_count() { return static_cast<Index>(gridDim.x) * blockDim.x; }

constexpr unsigned kAllLanes = 0xffffffffu;

struct Plus {
  template <class T>
  __device__ T operator()(const T& a, const T& b) const {
    return a + b;
  }
};

__device__ inline float from_lane(float x, int mask) {
  return __shfl_xor_sync(kAllLanes, x, mask);
}
__device__ inline double from_lane(double x, int mask) {
  return __shfl_xor_sync(kAllLanes, x, mask);
}

// Threads that work on one row together. `combine` must be commutative, so that all threads of a
// team come to the same bits. Blocks of either have kTeamThreads threads.

struct WarpTeam {
  static constexpr int kSize = 32;
  __device__ int index() const { return static_cast<int>(threadIdx.x) % 32; }
  // The number of the first row of this team, and the distance to its next.
  __device__ Index first() const { return thread_index() / 32; }
  __device__ Index step() const { return thread_count() / 32; }
  template <class T, class Combine>
  __device__ T all(T value, const Combine& combine) const {
    for (int mask = 16; mask > 0; mask /= 2) value = combine(value, from_lane(value, mask));
    return value;
  }
};

struct BlockTeam {
  static constexpr int kSize = kTeamThreads;
  __device__ int index() const { return static_cast<int>(threadIdx.x); }
  __device__ Index first() const { return blockIdx.x; }
  __device__ Index step() const { return gridDim.x; }
  template <class T, class Combine>
  __device__ T all(T value, const Combine& combine) const {
    __shared__ T parts[kTeamThreads / 32];
    value = WarpTeam().all(value, combine);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    value = parts[0];
    for (int i = 1; i < kTeamThreads / 32; ++i) value = combine(value, parts[i]);
    __syncthreads();  // the next call writes `parts`
    return value;
  }
};

__device__ inline void report(Fault* fault, Index place, Index value) {
  *fault = Fault{place + 1, value};
}
