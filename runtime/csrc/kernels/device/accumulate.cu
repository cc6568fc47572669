// The sum of two tensors, in the memory of the first.
#include "common.cuh"

extern "C" __global__ void accumulate(Element* to, const Element* from, Index n) {
  for_elements(n, aligned(to) && aligned(from), thread_index(), thread_count(),
               [&](Index i, auto lanes) {
                 constexpr int kWidth = decltype(lanes)::kCount;
                 Real sum[kWidth], more[kWidth];
                 load(sum, to + i);
                 load(more, from + i);
                 for (int k = 0; k < kWidth; ++k) sum[k] += more[k];
                 store(to + i, sum);
               });
}
