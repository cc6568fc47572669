// The sum of the squares of many tensors, in float64.
#include "common.cuh"
#include "square_sum.cuh"

// parts[block] = the sum of the squares of its piece
extern "C" __global__ void square_sum_pieces(double* parts, SquaredTensors tensors) {
  const Index block = blockIdx.x;
  int which = 0;
  while (tensors.first[which + 1] <= block) ++which;
  const Index begin = (block - tensors.first[which]) * kSquares;
  const Index left = tensors.count[which] - begin;
  const Element* data = tensors.data[which] + begin;
  double sum = 0;
  for_elements(left < kSquares ? left : kSquares, aligned(data), threadIdx.x, blockDim.x,
               [&](Index i, auto lanes) {
                 constexpr int kWidth = decltype(lanes)::kCount;
                 Real x[kWidth];
                 load(x, data + i);
                 for (int k = 0; k < kWidth; ++k) {
                   const double v = static_cast<double>(x[k]);
                   sum += v * v;
                 }
               });
  sum = BlockTeam().all(sum, Plus());
  if (threadIdx.x == 0) parts[block] = sum;
}

// One block. The result is float64 for float64 tensors, else float32.
extern "C" __global__ void square_sum_total(Real* to, const double* parts, Index count) {
  double sum = 0;
  for (Index i = threadIdx.x; i < count; i += blockDim.x) sum += parts[i];
  sum = BlockTeam().all(sum, Plus());
  if (threadIdx.x == 0) *to = static_cast<Real>(sum);
}
