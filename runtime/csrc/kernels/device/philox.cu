// A block of a global array of random numbers.
#include "common.cuh"
#include "philox.cuh"
#include "runs.cuh"

// A thread takes the part of a run that lies in one block of four.
extern "C" __global__ void philox_fill(float* out, Runs runs) {
  for (Index i = thread_index(); i < runs.count * runs.blocks; i += thread_count()) {
    const Index run = i / runs.blocks;
    Index begin = runs.first;
    Index left = run;
    for (int d = 0; d < runs.dims; ++d) {
      begin += left % runs.sizes[d] * runs.strides[d];
      left /= runs.sizes[d];
    }
    const Index block = begin / 4 + i % runs.blocks;
    const Index offset = block * 4 - begin;  // of the block's first number in the run
    if (offset >= runs.length) continue;
    const philox::Words words = philox::rounds(
        {{static_cast<unsigned>(block), static_cast<unsigned>(block >> 32), runs.state.at[2],
          runs.state.at[3]}},
        runs.state.at[0], runs.state.at[1]);
    float numbers[4];
    philox::numbers(words, runs.normal, numbers);
    float* to = out + run * runs.length + offset;
    if (offset >= 0 && offset + 4 <= runs.length && aligned(to)) {
      *reinterpret_cast<Pack<4>*>(to) = {{numbers[0], numbers[1], numbers[2], numbers[3]}};
      continue;
    }
    for (int k = 0; k < 4; ++k) {
      if (offset + k >= 0 && offset + k < runs.length) to[k] = numbers[k];
    }
  }
}
