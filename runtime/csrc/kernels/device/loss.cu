// Softmax cross-entropy and its gradient. Scores have shape [N, C, ...]; `inner` is the product of
// the dims after C, so that the scores of label i begin at (i / inner) C inner + i % inner and lie
// `inner` apart.
#include "common.cuh"
#include "loss.cuh"

namespace {

__device__ float not_a_number(float) { return __uint_as_float(0x7fc00000u); }
__device__ double not_a_number(double) { return not_a_number(0.0f); }

// A label's class, or -1 where it does not count; `weight` is 0 there, and no number where it is
// none of the classes.
__device__ Index read_label(const Labels& labels, Index i, double* weight, Fault* fault) {
  const Index label = labels.of[i];
  *weight = 0;
  if (labels.ignores && label == labels.ignore) return -1;
  if (label < 0 || label >= labels.classes) {
    *weight = not_a_number(0.0);
    report(fault, i, label);
    return -1;
  }
  *weight = labels.weights == nullptr ? 1 : static_cast<double>(widen(labels.weights[label]));
  return label;
}

// The greatest of some numbers, and the sum of exp(number - greatest).
struct LogSum {
  Real most;
  Real sum;
  __device__ void add(Real x) {
    if (x == lowest()) return;  // adds nothing, and would be no number before the first
    if (x > most) {
      sum = sum * exponential(most - x) + Real(1);
      most = x;
    } else {
      sum += exponential(x - most);
    }
  }
  __device__ static Real lowest() { return -static_cast<Real>(__uint_as_float(0x7f800000u)); }
  __device__ static LogSum none() { return {lowest(), Real(0)}; }
};

struct Join {
  __device__ LogSum operator()(const LogSum& a, const LogSum& b) const {
    const Real most = a.most > b.most ? a.most : b.most;
    if (most == LogSum::lowest()) return {most, a.sum + b.sum};
    return {most, a.sum * exponential(a.most - most) + b.sum * exponential(b.most - most)};
  }
};

__device__ LogSum from_lane(const LogSum& x, int mask) {
  return {::from_lane(x.most, mask), ::from_lane(x.sum, mask)};
}

__device__ void put(const Results& to, Index i, double weight, double value) {
  const double weighted = weight == 0 ? 0 : weight * value;
  if (to.each != nullptr) {
    narrow(to.each + i, static_cast<Real>(weighted));
  } else {
    to.values[i] = weighted;
    to.weights[i] = weight;
  }
}

template <class Team>
__device__ void loss_rows(Results to, Element* log_prob, const Element* scores,
                          const Labels& labels, Fault* fault) {
  const Team team;
  const Index n = labels.classes;
  const bool wide = n % kPack == 0 && aligned(scores) && aligned(log_prob);
  for (Index row = team.first(); row < labels.count; row += team.step()) {
    const Element* x = scores + row * n;
    LogSum sum = LogSum::none();
    for_elements(n, wide, team.index(), Team::kSize, [&](Index i, auto lanes) {
      constexpr int kWidth = decltype(lanes)::kCount;
      Real v[kWidth];
      load(v, x + i);
      for (int k = 0; k < kWidth; ++k) sum.add(v[k]);
    });
    sum = team.all(sum, Join());
    const Real log_sum = logarithm(sum.sum);
    if (team.index() == 0) {
      double weight = 0;
      const Index label = read_label(labels, row, &weight, fault);
      double value = 0;
      if (label >= 0) {
        value = static_cast<double>(sum.most) - static_cast<double>(widen(x[label])) +
                static_cast<double>(log_sum);
      }
      put(to, row, weight, value);
    }
    if (log_prob == nullptr) continue;
    for_elements(n, wide, team.index(), Team::kSize, [&](Index i, auto lanes) {
      constexpr int kWidth = decltype(lanes)::kCount;
      Real v[kWidth];
      load(v, x + i);
      for (int k = 0; k < kWidth; ++k) v[k] = (v[k] - sum.most) - log_sum;
      store(log_prob + row * n + i, v);
    });
  }
}

}  // namespace

extern "C" __global__ void loss_warps(Results to, Element* log_prob, const Element* scores,
                                      Labels labels, Fault* fault) {
  loss_rows<WarpTeam>(to, log_prob, scores, labels, fault);
}

extern "C" __global__ void loss_blocks(Results to, Element* log_prob, const Element* scores,
                                       Labels labels, Fault* fault) {
  loss_rows<BlockTeam>(to, log_prob, scores, labels, fault);
}

// One label a thread, where inner is not 1: neighbours read neighbours.
extern "C" __global__ void loss_columns(Results to, Element* log_prob, const Element* scores,
                                        Labels labels, Fault* fault) {
  for (Index i = thread_index(); i < labels.count; i += thread_count()) {
    const Index start = i / labels.inner * labels.classes * labels.inner + i % labels.inner;
    LogSum sum = LogSum::none();
    for (Index c = 0; c < labels.classes; ++c) sum.add(widen(scores[start + c * labels.inner]));
    const Real log_sum = logarithm(sum.sum);
    double weight = 0;
    const Index label = read_label(labels, i, &weight, fault);
    double value = 0;
    if (label >= 0) {
      value = static_cast<double>(sum.most) -
              static_cast<double>(widen(scores[start + label * labels.inner])) +
              static_cast<double>(log_sum);
    }
    put(to, i, weight, value);
    if (log_prob == nullptr) continue;
    for (Index c = 0; c < labels.classes; ++c) {
      const Index at = start + c * labels.inner;
      narrow(log_prob + at, (widen(scores[at]) - sum.most) - log_sum);
    }
  }
}

// One block: the loss out of what the labels gave.
extern "C" __global__ void loss_total(Element* loss, const double* values, const double* weights,
                                      Index count, LossReduction reduction) {
  double sum = 0;
  double total = 0;
  for (Index i = threadIdx.x; i < count; i += blockDim.x) {
    sum += values[i];
    total += weights[i];
  }
  sum = BlockTeam().all(sum, Plus());
  total = BlockTeam().all(total, Plus());
  if (threadIdx.x == 0) {
    narrow(loss, static_cast<Real>(reduction == LossReduction::kMean ? sum / total : sum));
  }
}

// One block: the weight of all labels together.
extern "C" __global__ void loss_grad_total(double* total, Labels labels, Fault* fault) {
  double sum = 0;
  for (Index i = threadIdx.x; i < labels.count; i += blockDim.x) {
    double weight = 0;
    read_label(labels, i, &weight, fault);
    sum += weight;
  }
  sum = BlockTeam().all(sum, Plus());
  if (threadIdx.x == 0) *total = sum;
}

namespace {

// d loss / d (score) = factor (probability - [it is the label's]).
__device__ Real factor_of(const Factor& factor, Index i, double weight) {
  if (factor.reduction == LossReduction::kNone) {
    return load_any<Real>(factor.dloss, factor.dloss_type, i) *
           static_cast<Real>(weight);
  }
  double all = load_any(factor.dloss, factor.dloss_type, 0);
  if (factor.reduction == LossReduction::kMean) {
    all = *factor.total == 0 ? 0 : all / *factor.total;
  }
  return static_cast<Real>(all * weight);
}

}  // namespace

// inner is 1. A block takes a row at a time.
extern "C" __global__ void loss_grad_rows(Element* dx, Factor factor, const Element* log_prob,
                                          Labels labels, Fault* fault) {
  const Index n = labels.classes;
  const bool wide = n % kPack == 0 && aligned(dx) && aligned(log_prob);
  for (Index row = blockIdx.x; row < labels.count; row += gridDim.x) {
    double weight = 0;
    const Index label = read_label(labels, row, &weight, fault);
    const bool counts = weight != 0;
    const Real f = counts ? factor_of(factor, row, weight) : Real(0);
    for_elements(n, wide, threadIdx.x, blockDim.x, [&](Index i, auto lanes) {
      constexpr int kWidth = decltype(lanes)::kCount;
      Real v[kWidth];
      load(v, log_prob + row * n + i);
      for (int k = 0; k < kWidth; ++k) {
        v[k] = counts ? f * exponential(v[k]) - (i + k == label ? f : Real(0)) : Real(0);
      }
      store(dx + row * n + i, v);
    });
  }
}

extern "C" __global__ void loss_grad_columns(Element* dx, Factor factor, const Element* log_prob,
                                             Labels labels, Fault* fault) {
  const Index slab = labels.classes * labels.inner;
  const Index elements = labels.count / labels.inner * slab;
  for (Index e = thread_index(); e < elements; e += thread_count()) {
    const Index i = e / slab * labels.inner + e % labels.inner;
    const Index c = e % slab / labels.inner;
    double weight = 0;
    const Index label = read_label(labels, i, &weight, fault);
    Real value = 0;
    if (weight != 0) {
      const Real f = factor_of(factor, i, weight);
      value = f * exponential(widen(log_prob[e])) - (c == label ? f : Real(0));
    }
    narrow(dx + e, value);
  }
}
