// Gradients of what normalises rows: softmax, its logarithm, layer and RMS normalisation.
#include "common.cuh"
#include "rows.cuh"

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

// Packs of each operand that a thread holds in registers, so that a short row is read only once.
constexpr int kHeld = kPack == 2 ? 4 : 32 / kPack;

// As softmax_rows, for rows that a team holds.
template <class Rule, class Team>
__device__ void held_softmax_rows(const Team& team, Element* dx, const Element* dy,
                                  const Element* y, Index rows, Index n) {
  for (Index row = team.first(); row < rows; row += team.step()) {
    const Index start = row * n;
    Real d[kHeld][kPack] = {}, v[kHeld][kPack] = {};
    Real sum = 0;
#pragma unroll
    for (int p = 0; p < kHeld; ++p) {
      const int i = (p * Team::kSize + team.index()) * kPack;
      if (i < n) {
        load(d[p], dy + start + i);
        load(v[p], y + start + i);
      }
    }
#pragma unroll
    for (int p = 0; p < kHeld; ++p) {
      for (int k = 0; k < kPack; ++k) sum += Rule::term(d[p][k], v[p][k]);
    }
    sum = team.all(sum, Plus());
#pragma unroll
    for (int p = 0; p < kHeld; ++p) {
      const int i = (p * Team::kSize + team.index()) * kPack;
      for (int k = 0; k < kPack; ++k) d[p][k] = Rule::gradient(d[p][k], v[p][k], sum);
      if (i < n) store(dx + start + i, d[p]);
    }
  }
}

// Rows of n elements, one after the other; a team takes a row at a time. dx may be dy or y.
template <class Rule, class Team>
__device__ void softmax_rows(Element* dx, const Element* dy, const Element* y, Index rows,
                             Index n) {
  const Team team;
  const bool wide = n % kPack == 0 && aligned(dx) && aligned(dy) && aligned(y);
  if (wide && n <= kHeld * kPack * Team::kSize) {
    held_softmax_rows<Rule>(team, dx, dy, y, rows, n);
    return;
  }
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

// What layer and RMS normalisation differ in: whether the mean is subtracted, so that there is a
// gradient of a bias too.
struct Centred {
  static constexpr int kSums = 2;
  __device__ static Real mean(const Norm& l, Index row) {
    return load_any<Real>(l.mean, l.mean_type, row);
  }
};
struct Plain {
  static constexpr int kSums = 1;
  __device__ static Real mean(const Norm&, Index) { return Real(0); }
};

__device__ Real inverse_of(const Norm& l, Index row) {
  return load_any<Real>(l.inv_std, l.inv_std_type, row);
}

// With h = (x - mean) inv_std and w = dy scale: dx = inv_std (w - mean(w) - h mean(w h)). If
// nothing is centred, mean and mean(w) count as 0.
template <class Rule, class Team>
__device__ void norm_rows(Element* dx, const Norm& l) {
  const Team team;
  const Index n = l.n;
  const bool wide =
      n % kPack == 0 && aligned(dx) && aligned(l.dy) && aligned(l.x) && aligned(l.scale);
  for (Index row = team.first(); row < l.rows; row += team.step()) {
    const Index start = row * n;
    const Real mean = Rule::mean(l, row);
    const Real inverse = inverse_of(l, row);
    // Calls f(i, w, h) for the elements from i on, as many as w and h have.
    const auto each = [&](auto f) {
      for_elements(n, wide, team.index(), Team::kSize, [&](Index i, auto lanes) {
        constexpr int kWidth = decltype(lanes)::kCount;
        Real w[kWidth], h[kWidth], s[kWidth];
        load(w, l.dy + start + i);
        load(h, l.x + start + i);
        load(s, l.scale + i);
        for (int k = 0; k < kWidth; ++k) {
          w[k] *= s[k];
          h[k] = (h[k] - mean) * inverse;
        }
        f(i, w, h);
      });
    };
    Real sum = 0;
    Real dot = 0;
    each([&](Index, const auto& w, const auto& h) {
      for (int k = 0; k < static_cast<int>(sizeof(w) / sizeof(Real)); ++k) {
        sum += w[k];
        dot += w[k] * h[k];
      }
    });
    sum = Rule::kSums == 2 ? team.all(sum, Plus()) / static_cast<Real>(n) : Real(0);
    dot = team.all(dot, Plus()) / static_cast<Real>(n);
    each([&](Index i, auto& w, const auto& h) {
      for (int k = 0; k < static_cast<int>(sizeof(w) / sizeof(Real)); ++k) {
        w[k] = inverse * (w[k] - sum - h[k] * dot);
      }
      store(dx + start + i, w);
    });
  }
}

// parts[chunk][0][c] = sum(dy h) and, if centred, parts[chunk][1][c] = sum(dy) over the rows of the
// chunk, of `length` rows. A block of 32 x 8 threads takes 32 columns of a chunk.
template <class Rule>
__device__ void norm_columns(Real* parts, const Norm& l, Index length) {
  constexpr int kSums = Rule::kSums;
  const Index n = l.n;
  const Index column = static_cast<Index>(blockIdx.x) * kTileColumns + threadIdx.x;
  const Index begin = static_cast<Index>(blockIdx.y) * length;
  const Index end = l.rows - begin < length ? l.rows : begin + length;
  Real of_scale = 0;
  Real of_bias = 0;
  if (column < n) {
#pragma unroll 4
    for (Index row = begin + threadIdx.y; row < end; row += kTileRows) {
      const Real d = widen(l.dy[row * n + column]);
      of_scale += d * ((widen(l.x[row * n + column]) - Rule::mean(l, row)) * inverse_of(l, row));
      of_bias += d;
    }
  }
  __shared__ Real tile[2][kTileRows][kTileColumns];
  tile[0][threadIdx.y][threadIdx.x] = of_scale;
  tile[1][threadIdx.y][threadIdx.x] = of_bias;
  __syncthreads();
  if (threadIdx.y < kSums && column < n) {
    Real sum = 0;
    for (int i = 0; i < kTileRows; ++i) sum += tile[threadIdx.y][i][threadIdx.x];
    parts[(static_cast<Index>(blockIdx.y) * kSums + threadIdx.y) * n + column] = sum;
  }
}

}  // namespace

#define ONNXPAR_NORM(name, Rule)                                                    \
  extern "C" __global__ void name##_warps(Element* dx, Norm l) {                    \
    norm_rows<Rule, WarpTeam>(dx, l);                                               \
  }                                                                                 \
  extern "C" __global__ void name##_blocks(Element* dx, Norm l) {                   \
    norm_rows<Rule, BlockTeam>(dx, l);                                              \
  }                                                                                 \
  extern "C" __global__ void name##_columns(Real* parts, Norm l, Index length) {    \
    norm_columns<Rule>(parts, l, length);                                           \
  }

ONNXPAR_NORM(layer_norm_grad, Centred)
ONNXPAR_NORM(rms_norm_grad, Plain)

// Adds the chunks, of `width` sums each, in order. Either output may be null.
extern "C" __global__ void norm_grad_finish(Element* dscale, Element* dbias, const Real* parts,
                                            Index chunks, Index n, Index width) {
  for (Index i = thread_index(); i < width; i += thread_count()) {
    Element* to = i < n ? dscale : dbias;
    if (to == nullptr) continue;
    Real sum = 0;
    for (Index chunk = 0; chunk < chunks; ++chunk) sum += parts[chunk * width + i];
    narrow(to + i % n, sum);
  }
}
