// Weights of convolutions in another order.
#include "common.cuh"

// From [groups, many, few, taps] to [groups, few, many, taps reversed].
extern "C" __global__ void turned_weights(Element* to, const Element* from, Index groups,
                                          Index many, Index few, Index taps) {
  const Index count = groups * many * few * taps;
  for (Index i = thread_index(); i < count; i += thread_count()) {
    const Index tap = i % taps;
    const Index m = i / taps % many;
    const Index c = i / (taps * many) % few;
    const Index group = i / (taps * many * few);
    to[i] = from[((group * many + m) * few + c) * taps + taps - 1 - tap];
  }
}
