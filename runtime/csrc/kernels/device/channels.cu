// Batch normalisation in training: sums over channels, and the gradient of the operand.
#include "common.cuh"
#include "channels.cuh"

namespace {

// Calls f(i) for this thread's share of a channel's elements, where i is the element's place.
template <class Team, class F>
__device__ void each_element(const Team& team, const ChannelRuns& of, Index channel, const F& f) {
  const Index count = of.outer * of.inner;
  for (Index j = team.index(); j < count; j += Team::kSize) {
    f((j / of.inner * of.channels + channel) * of.inner + j % of.inner);
  }
}

template <class Team>
__device__ void sums_of(Element* total, Element* along, const Element* dy, const Element* x,
                        const Element* mean, const ChannelRuns& of) {
  const Team team;
  for (Index channel = team.first(); channel < of.channels; channel += team.step()) {
    const Real middle = widen(mean[channel]);
    Real sum = 0;
    Real dot = 0;
    each_element(team, of, channel, [&](Index i) {
      const Real d = widen(dy[i]);
      sum += d;
      dot += d * (widen(x[i]) - middle);
    });
    sum = team.all(sum, Plus());
    dot = team.all(dot, Plus());
    if (team.index() == 0) {
      narrow(total + channel, sum);
      narrow(along + channel, dot);
    }
  }
}

template <class Team>
__device__ void squares_of(Element* to, const Element* x, const Element* mean,
                           const ChannelRuns& of) {
  const Team team;
  for (Index channel = team.first(); channel < of.channels; channel += team.step()) {
    const Real middle = widen(mean[channel]);
    Real sum = 0;
    each_element(team, of, channel, [&](Index i) {
      const Real c = widen(x[i]) - middle;
      sum += c * c;
    });
    sum = team.all(sum, Plus());
    if (team.index() == 0) narrow(to + channel, sum);
  }
}

}  // namespace

#define ONNXPAR_TEAM(suffix, Team)                                                             \
  extern "C" __global__ void channel_sums##suffix(Element* total, Element* along,              \
                                                  const Element* dy, const Element* x,         \
                                                  const Element* mean, ChannelRuns of) {       \
    sums_of<Team>(total, along, dy, x, mean, of);                                              \
  }                                                                                            \
  extern "C" __global__ void channel_square_sum##suffix(Element* to, const Element* x,         \
                                                        const Element* mean, ChannelRuns of) { \
    squares_of<Team>(to, x, mean, of);                                                         \
  }

ONNXPAR_TEAM(_warps, WarpTeam)
ONNXPAR_TEAM(_blocks, BlockTeam)

// dx = scale inv_std (dy - total / n - (x - mean) inv_std slope / n)
extern "C" __global__ void batch_norm_grad(Element* dx, BatchNormGrad g, ChannelRuns of) {
  const Index count = of.outer * of.channels * of.inner;
  const Real n = widen(*g.count);
  for (Index i = thread_index(); i < count; i += thread_count()) {
    const Index channel = i / of.inner % of.channels;
    const Real inverse = widen(g.inv_std[channel]);
    const Real bend = widen(g.slope[channel]) / n * inverse;
    const Real centred = widen(g.x[i]) - widen(g.mean[channel]);
    const Real rest = widen(g.dy[i]) - widen(g.total[channel]) / n - centred * bend;
    narrow(dx + i, widen(g.scale[channel]) * inverse * rest);
  }
}
