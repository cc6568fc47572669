// Gradients of what normalises rows: softmax, its logarithm and layer normalisation.
#include "common.cuh"

namespace {

// What softmax and its logarithm differ in: the term that is summed, and the gradient.
struct Softmax {
  __device__ static Real term(Real d, Real y) { return d * y; }
  __device__ static Real gradient(Real d, Real y, Real sum) { return y * (d - sum); }
};
struct LogSoftmax {
  __device__ static Real term(Real d, Real) { return d; }
  __device__ static Real gradient(Real d, Real y, Real sum) { return d - exponential(y) * sum; }
};

// Rows of n elements, one after the other; a team takes a row at a time. dx may be dy or y.
template <class Rule, class Team>
__device__ void softmax_rows(Element* dx, const Element* dy, const Element* y, Index rows,
                             Index n) {
  const Team team;
  const bool wide = n % kPack == 0 && aligned(dx) && aligned(dy) && aligned(y);
  for (Index row = team.first(); row < rows; row += team.step()) {
    const Index start = row * n;
    Real sum = 0;
    for_elements(n, wide, team.index(), Team::kSize, [&](Index i, auto lanes) {
      constexpr int kWidth = decltype(lanes)::kCount;
      Real d[kWidth], v[kWidth];
      load(d, dy + start + i);
      load(v, y + start + i);
      for (int k = 0; k < kWidth; ++k) sum += Rule::term(d[k], v[k]);
    });
    sum = team.all(sum, Plus());
    for_elements(n, wide, team.index(), Team::kSize, [&](Index i, auto lanes) {
      constexpr int kWidth = decltype(lanes)::kCount;
      Real d[kWidth], v[kWidth];
      load(d, dy + start + i);
      load(v, y + start + i);
      for (int k = 0; k < kWidth; ++k) d[k] = Rule::gradient(d[k], v[k], sum);
      store(dx + start + i, d);
    });
  }
}

// `inner` softmaxes side by side in each of `outer` slabs: element i of each is at i * inner. A
// thread takes one; neighbours read neighbours. The sum is made of blocks, so that its error does
// not grow with n.
template <class Rule>
__device__ void softmax_columns(Element* dx, const Element* dy, const Element* y, Index outer,
                                Index n, Index inner) {
  constexpr Index kBlock = 256;
  for (Index c = thread_index(); c < outer * inner; c += thread_count()) {
    const Index start = c / inner * n * inner + c % inner;
    Real sum = 0;
    for (Index begin = 0; begin < n; begin += kBlock) {
      const Index end = n - begin < kBlock ? n : begin + kBlock;
      Real part = 0;
      for (Index i = begin; i < end; ++i) {
        part += Rule::term(widen(dy[start + i * inner]), widen(y[start + i * inner]));
      }
      sum += part;
    }
    for (Index i = 0; i < n; ++i) {
      const Index at = start + i * inner;
      narrow(dx + at, Rule::gradient(widen(dy[at]), widen(y[at]), sum));
    }
  }
}

}  // namespace

#define ONNXPAR_SOFTMAX(name, Rule)                                                              \
  extern "C" __global__ void name##_warps(Element* dx, const Element* dy, const Element* y,      \
                                          Index rows, Index n) {                                 \
    softmax_rows<Rule, WarpTeam>(dx, dy, y, rows, n);                                            \
  }                                                                                              \
  extern "C" __global__ void name##_blocks(Element* dx, const Element* dy, const Element* y,     \
                                           Index rows, Index n) {                                \
    softmax_rows<Rule, BlockTeam>(dx, dy, y, rows, n);                                           \
  }                                                                                              \
  extern "C" __global__ void name##_columns(Element* dx, const Element* dy, const Element* y,    \
                                            Index outer, Index n, Index inner) {                 \
    softmax_columns<Rule>(dx, dy, y, outer, n, inner);                                           \
  }

ONNXPAR_SOFTMAX(softmax_grad, Softmax)
ONNXPAR_SOFTMAX(log_softmax_grad, LogSoftmax)

namespace {

// With h = (x - mean) inv_std and w = dy scale: dx = inv_std (w - mean(w) - h mean(w h)).
template <class Team>
__device__ void layer_norm_rows(Element* dx, const Element* dy, const Element* x,
                                const Element* scale, const void* means, const void* inverses,
                                int mean_type, int inverse_type, Index rows, Index n) {
  const Team team;
  const bool wide =
      n % kPack == 0 && aligned(dx) && aligned(dy) && aligned(x) && aligned(scale);
  for (Index row = team.first(); row < rows; row += team.step()) {
    const Index start = row * n;
    const Real mean = static_cast<Real>(load_any(means, mean_type, row));
    const Real inverse = static_cast<Real>(load_any(inverses, inverse_type, row));
    Real sum = 0;
    Real dot = 0;
    for_elements(n, wide, team.index(), Team::kSize, [&](Index i, auto lanes) {
      constexpr int kWidth = decltype(lanes)::kCount;
      Real d[kWidth], v[kWidth], s[kWidth];
      load(d, dy + start + i);
      load(v, x + start + i);
      load(s, scale + i);
      for (int k = 0; k < kWidth; ++k) {
        const Real w = d[k] * s[k];
        sum += w;
        dot += w * ((v[k] - mean) * inverse);
      }
    });
    sum = team.all(sum, Plus()) / static_cast<Real>(n);
    dot = team.all(dot, Plus()) / static_cast<Real>(n);
    for_elements(n, wide, team.index(), Team::kSize, [&](Index i, auto lanes) {
      constexpr int kWidth = decltype(lanes)::kCount;
      Real d[kWidth], v[kWidth], s[kWidth];
      load(d, dy + start + i);
      load(v, x + start + i);
      load(s, scale + i);
      for (int k = 0; k < kWidth; ++k) {
        d[k] = inverse * (d[k] * s[k] - sum - (v[k] - mean) * inverse * dot);
      }
      store(dx + start + i, d);
    });
  }
}

constexpr int kTileColumns = 32;
constexpr int kTileRows = 8;

}  // namespace

extern "C" __global__ void layer_norm_grad_warps(Element* dx, const Element* dy, const Element* x,
                                                 const Element* scale, const void* means,
                                                 const void* inverses, int mean_type,
                                                 int inverse_type, Index rows, Index n) {
  layer_norm_rows<WarpTeam>(dx, dy, x, scale, means, inverses, mean_type, inverse_type, rows, n);
}

extern "C" __global__ void layer_norm_grad_blocks(Element* dx, const Element* dy,
                                                  const Element* x, const Element* scale,
                                                  const void* means, const void* inverses,
                                                  int mean_type, int inverse_type, Index rows,
                                                  Index n) {
  layer_norm_rows<BlockTeam>(dx, dy, x, scale, means, inverses, mean_type, inverse_type, rows, n);
}

// parts[chunk][0][c] = sum(dy h) and parts[chunk][1][c] = sum(dy) over the rows of the chunk, of
// `length` rows. A block of 32 x 8 threads takes 32 columns of a chunk.
extern "C" __global__ void layer_norm_grad_columns(Real* parts, const Element* dy,
                                                   const Element* x, const void* means,
                                                   const void* inverses, int mean_type,
                                                   int inverse_type, Index rows, Index n,
                                                   Index length) {
  const Index column = static_cast<Index>(blockIdx.x) * kTileColumns + threadIdx.x;
  const Index begin = static_cast<Index>(blockIdx.y) * length;
  const Index end = rows - begin < length ? rows : begin + length;
  Real of_scale = 0;
  Real of_bias = 0;
  if (column < n) {
    for (Index row = begin + threadIdx.y; row < end; row += kTileRows) {
      const Real mean = static_cast<Real>(load_any(means, mean_type, row));
      const Real inverse = static_cast<Real>(load_any(inverses, inverse_type, row));
      const Real d = widen(dy[row * n + column]);
      of_scale += d * ((widen(x[row * n + column]) - mean) * inverse);
      of_bias += d;
    }
  }
  __shared__ Real tile[2][kTileRows][kTileColumns];
  tile[0][threadIdx.y][threadIdx.x] = of_scale;
  tile[1][threadIdx.y][threadIdx.x] = of_bias;
  __syncthreads();
  if (threadIdx.y < 2 && column < n) {
    Real sum = 0;
    for (int i = 0; i < kTileRows; ++i) sum += tile[threadIdx.y][i][threadIdx.x];
    parts[(static_cast<Index>(blockIdx.y) * 2 + threadIdx.y) * n + column] = sum;
  }
}

// Adds the chunks in order. Either output may be null.
extern "C" __global__ void layer_norm_grad_finish(Element* dscale, Element* dbias,
                                                  const Real* parts, Index chunks, Index n) {
  for (Index i = thread_index(); i < 2 * n; i += thread_count()) {
    Element* to = i < n ? dscale : dbias;
    if (to == nullptr) continue;
    Real sum = 0;
    for (Index chunk = 0; chunk < chunks; ++chunk) sum += parts[chunk * 2 * n + i];
    narrow(to + i % n, sum);
  }
}
