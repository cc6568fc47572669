// Softmax cross-entropy, as onnxruntime's SoftmaxCrossEntropyLoss but on all threads, and its
// gradient.
#include <algorithm>
#include <cstring>

#include "kernels/host/simd.h"
#include "kernels/loss.h"

namespace onnxpar {
namespace {

constexpr int64_t kIgnored = -1;

// The labels of scores (or their logarithms) of shape [N, C, ...].
struct Labels {
  size_t classes;
  size_t inner;                // the dims after C, together
  std::vector<int64_t> which;  // the class of each, kIgnored for those that do not count
  std::vector<double> weight;  // of each, 0 for those
  double total = 0;            // weight
};

Labels read_labels(const Labelled& of, std::optional<int64_t> ignore_index) {
  Labels read{of.classes, of.inner, of.labels.integers(), {}};
  std::vector<double> of_class(read.classes, 1);
  if (of.weights) convert(of_class.data(), *of.weights, "weights");
  read.weight.resize(read.which.size());
  for (size_t i = 0; i < read.which.size(); ++i) {
    int64_t& which = read.which[i];
    if (ignore_index && which == *ignore_index) {
      which = kIgnored;
      continue;
    }
    if (which < 0 || which >= static_cast<int64_t>(read.classes)) {
      throw std::invalid_argument("label " + std::to_string(i) + " is " + std::to_string(which) +
                                  ", expected one of " + std::to_string(read.classes) +
                                  " classes");
    }
    read.weight[i] = of_class[static_cast<size_t>(which)];
    read.total += read.weight[i];
  }
  return read;
}

// What Loops::log_sum_exp gives for the classes of each label.
template <class T>
struct LogSums {
  std::vector<T> most;
  std::vector<T> log_sum;
};

template <class T>
LogSums<T> log_sums(const Io& io, const T* scores, const Labels& labels) {
  const auto& loops = simd().of<T>();
  const size_t count = labels.which.size();
  const size_t classes = labels.classes;
  const size_t inner = labels.inner;
  LogSums<T> sums{std::vector<T>(count), std::vector<T>(count)};
  if (inner == 1) {
    pieces(io, count, std::max<size_t>(1, kPiece / classes), [&](size_t begin, size_t rows) {
      for (size_t row = begin; row < begin + rows; ++row) {
        loops.log_sum_exp(&sums.most[row], &sums.log_sum[row], scores + row * classes, classes);
      }
    });
  } else {
    const size_t blocks = (inner + kColumns - 1) / kColumns;
    pieces(io, count / inner * blocks, 1, [&](size_t index, size_t) {
      const size_t sample = index / blocks;
      const size_t column = index % blocks * kColumns;
      const size_t at = sample * inner + column;
      loops.log_sum_exp_columns(sums.most.data() + at, sums.log_sum.data() + at,
                                scores + sample * classes * inner + column, classes, inner,
                                std::min(kColumns, inner - column));
    });
  }
  return sums;
}

template <class T>
void write_log_prob(const Io& io, T* log_prob, const T* scores, const LogSums<T>& sums,
                    const Labels& labels) {
  const auto& loops = simd().of<T>();
  const size_t classes = labels.classes;
  const size_t inner = labels.inner;
  const size_t length = inner == 1 ? classes : inner;
  const size_t rows = inner == 1 ? sums.most.size() : sums.most.size() / inner * classes;
  pieces(io, rows, std::max<size_t>(1, kPiece / length), [&](size_t begin, size_t count) {
    for (size_t row = begin; row < begin + count; ++row) {
      T* to = log_prob + row * length;
      const T* from = scores + row * length;
      if (inner == 1) {
        loops.log_softmax(to, from, sums.most[row], sums.log_sum[row], length);
      } else {
        const size_t at = row / classes * inner;
        loops.log_softmax_each(to, from, sums.most.data() + at, sums.log_sum.data() + at, length);
      }
    }
  });
}

// The place of label i's class among the scores.
size_t place(const Labels& labels, size_t i) {
  const size_t row = i / labels.inner * labels.classes + static_cast<size_t>(labels.which[i]);
  return row * labels.inner + i % labels.inner;
}

// d loss / d (score of a label's class) is factor * (probability - 1).
template <class T>
std::vector<T> label_factors(const Labels& labels, const Tensor& dloss, LossReduction reduction) {
  std::vector<T> factors(labels.which.size());
  if (reduction == LossReduction::kNone) {
    const Reader<T> each(dloss, "dloss");
    for (size_t i = 0; i < factors.size(); ++i) {
      factors[i] = each.data()[i] * static_cast<T>(labels.weight[i]);
    }
    return factors;
  }
  double all = 0;
  convert(&all, dloss, "dloss");
  if (reduction == LossReduction::kMean) all = labels.total == 0 ? 0 : all / labels.total;
  for (size_t i = 0; i < factors.size(); ++i) factors[i] = static_cast<T>(all * labels.weight[i]);
  return factors;
}

}  // namespace

void Loss::host(const Io& io, const Operands& o) const {
  const Tensor& scores = o.of.scores;
  const Labels labels = read_labels(o.of, ignore_index_);
  with_real(scores, "scores", [&](auto zero) {
    using T = decltype(zero);
    const Reader<T> x(scores, "scores");
    LogSums<T> sums;
    if (scores.count() != 0) sums = log_sums(io, x.data(), labels);
    if (o.log_prob.data != nullptr && !sums.most.empty()) {
      Writer<T> log_prob(o.log_prob);
      write_log_prob(io, log_prob.data(), x.data(), sums, labels);
      log_prob.finish();
    }
    const bool each = reduction_ == LossReduction::kNone;
    Writer<T> out(o.loss);
    double sum = 0;
    for (size_t i = 0; i < labels.which.size(); ++i) {
      double value = 0;
      if (labels.which[i] != kIgnored) {
        const double below = static_cast<double>(sums.most[i]) -
                             static_cast<double>(x.data()[place(labels, i)]);
        value = labels.weight[i] * (below + static_cast<double>(sums.log_sum[i]));
      }
      if (each) out.data()[i] = static_cast<T>(value);
      sum += value;
    }
    if (reduction_ == LossReduction::kMean) sum /= labels.total;
    if (!each) *out.data() = static_cast<T>(sum);
    out.finish();
  });
}

void LossGrad::host(const Io& io, const Operands& o) const {
  const Tensor& log_prob = o.of.scores;
  const Labels labels = read_labels(o.of, ignore_index_);
  with_real(log_prob, "log_prob", [&](auto zero) {
    using T = decltype(zero);
    const Reader<T> y(log_prob, "log_prob");
    const std::vector<T> factors = label_factors<T>(labels, o.dloss, reduction_);
    Writer<T> dx(o.dx);
    if (log_prob.count() == 0) return;
    const auto& loops = simd().of<T>();
    const size_t classes = labels.classes;
    const size_t inner = labels.inner;
    const size_t length = inner == 1 ? classes : inner;
    pieces(io, log_prob.count() / length, std::max<size_t>(1, kPiece / length),
           [&](size_t begin, size_t rows) {
             for (size_t row = begin; row < begin + rows; ++row) {
               T* to = dx.data() + row * length;
               const T* from = y.data() + row * length;
               if (inner != 1) {
                 loops.scaled_exp_each(to, from, factors.data() + row / classes * inner, inner);
               } else if (labels.which[row] == kIgnored) {
                 std::memset(to, 0, length * sizeof(T));
               } else {
                 loops.scaled_exp(to, from, factors[row], length);
               }
             }
           });
    for (size_t i = 0; i < labels.which.size(); ++i) {
      if (labels.which[i] != kIgnored) dx.data()[place(labels, i)] -= factors[i];
    }
    dx.finish();
  });
}

}  // namespace onnxpar
