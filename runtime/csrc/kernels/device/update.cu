// Steps of optimizers: a parameter and its moments in one pass over memory.
#include "common.cuh"
#include "update.cuh"

namespace {

__device__ Real read(const Scalars& scalars, Scalar which, double otherwise) {
  const double* scalar = scalars.of[which];
  return static_cast<Real>(scalar == nullptr ? otherwise : *scalar);
}

// kStates counts p and the moments.
struct Sgd {
  static constexpr int kStates = 1;
  Real scale, learning, weight_decay;
  __device__ explicit Sgd(const Scalars& s)
      : scale(read(s, kScale, 1)),
        learning(read(s, kLearning, 0)),
        weight_decay(read(s, kWeightDecay, 0)) {}
  __device__ void operator()(Real* state, Real g) const {
    state[0] = state[0] - learning * (scale * g + weight_decay * state[0]);
  }
};

struct Momentum {
  static constexpr int kStates = 2;
  Real scale, learning, weight_decay, keep, take;
  __device__ explicit Momentum(const Scalars& s)
      : scale(read(s, kScale, 1)),
        learning(read(s, kLearning, 0)),
        weight_decay(read(s, kWeightDecay, 0)) {
    const bool first = *s.of[kFirst] != 0;
    keep = first ? Real(0) : read(s, kKeep1, 0);
    take = first ? Real(1) : static_cast<Real>(1 - *s.of[kDampening]);
  }
  __device__ void operator()(Real* state, Real g) const {
    const Real gradient = scale * g + weight_decay * state[0];
    const Real moment = keep * state[1] + take * gradient;
    state[1] = moment;
    state[0] = state[0] - learning * moment;
  }
};

struct Adam {
  static constexpr int kStates = 3;
  Real scale, learning, weight_decay, decay, keep1, take1, keep2, take2, correction2, eps;
  __device__ explicit Adam(const Scalars& s)
      : scale(read(s, kScale, 1)),
        learning(read(s, kLearning, 0)),
        weight_decay(read(s, kWeightDecay, 0)),
        decay(read(s, kDecay, 1)),
        keep1(read(s, kKeep1, 0)),
        take1(read(s, kTake1, 0)),
        keep2(read(s, kKeep2, 0)),
        take2(read(s, kTake2, 0)),
        correction2(read(s, kCorrection2, 1)),
        eps(read(s, kEps, 0)) {}
  __device__ void operator()(Real* state, Real g) const {
    const Real gradient = scale * g + weight_decay * state[0];
    const Real first = keep1 * state[1] + take1 * gradient;
    const Real second = keep2 * state[2] + take2 * (gradient * gradient);
    state[1] = first;
    state[2] = second;
    state[0] = decay * state[0] - learning * (first / (root(second) / correction2 + eps));
  }
};

template <class Rule>
__device__ void step(const StepTensors& at, Index n, const Scalars& scalars) {
  const Rule rule(scalars);
  const bool active = read(scalars, kActive, 1) != 0;
  bool wide = aligned(at.gradient);
  for (int s = 0; s < Rule::kStates; ++s) wide = wide && aligned(at.to[s]) && aligned(at.from[s]);
  for_elements(n, wide, thread_index(), thread_count(), [&](Index i, auto lanes) {
    constexpr int kWidth = decltype(lanes)::kCount;
    Real gradient[kWidth], state[Rule::kStates][kWidth];
    load(gradient, at.gradient + i);
    for (int s = 0; s < Rule::kStates; ++s) load(state[s], at.from[s] + i);
    for (int k = 0; k < kWidth; ++k) {
      Real one[Rule::kStates];
      for (int s = 0; s < Rule::kStates; ++s) one[s] = state[s][k];
      if (active) rule(one, gradient[k]);
      for (int s = 0; s < Rule::kStates; ++s) state[s][k] = one[s];
    }
    for (int s = 0; s < Rule::kStates; ++s) store(at.to[s] + i, state[s]);
  });
}

}  // namespace

extern "C" __global__ void sgd_step(StepTensors at, Index n, Scalars scalars) {
  step<Sgd>(at, n, scalars);
}

extern "C" __global__ void momentum_step(StepTensors at, Index n, Scalars scalars) {
  step<Momentum>(at, n, scalars);
}

extern "C" __global__ void adam_step(StepTensors at, Index n, Scalars scalars) {
  step<Adam>(at, n, scalars);
}
