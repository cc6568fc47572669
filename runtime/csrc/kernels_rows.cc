// Gradients of what normalises rows: softmax, its logarithm, layer normalisation and the loss.
#include <algorithm>
#include <cstring>

#include "kernels_io.h"

namespace onnxpar {
namespace {

// Columns of a softmax over a dim that is not the last, taken together.
constexpr size_t kColumns = 256;

size_t product(const Shape& shape, size_t begin, size_t end) {
  size_t n = 1;
  for (size_t i = begin; i < end; ++i) n *= static_cast<size_t>(shape[i]);
  return n;
}

size_t axis_of(const Shape& shape, int64_t axis) {
  const int64_t rank = static_cast<int64_t>(shape.size());
  if (axis < -rank || axis >= rank) {
    throw std::invalid_argument("axis is " + std::to_string(axis) + " for a tensor of shape " +
                                to_text(shape));
  }
  return static_cast<size_t>(axis < 0 ? axis + rank : axis);
}

template <class SelectRow, class SelectColumns>
Compute softmax(int64_t axis, SelectRow select_row, SelectColumns select_columns) {
  return [=](const Io& io) {
    const Tensor dy = io.input(0);
    const Tensor y = io.input(1);
    expect_like(y, "y", dy, "dy");
    const size_t at = axis_of(dy.shape, axis);
    const size_t outer = product(dy.shape, 0, at);
    const size_t n = static_cast<size_t>(dy.shape[at]);
    const size_t inner = product(dy.shape, at + 1, dy.shape.size());
    with_real(dy, "dy", [&](auto zero) {
      using T = decltype(zero);
      const Reader<T> from(dy, "dy");
      const Reader<T> result(y, "y");
      Writer<T> dx(io, 0, dy.shape, dy.type);
      if (n * inner == 0) return;
      if (inner == 1) {
        const auto loop = select_row(simd().of<T>());
        pieces(io, outer, std::max<size_t>(1, kPiece / n), [&](size_t begin, size_t rows) {
          for (size_t row = begin; row < begin + rows; ++row) {
            loop(dx.data() + row * n, from.data() + row * n, result.data() + row * n, n);
          }
        });
      } else {
        const auto loop = select_columns(simd().of<T>());
        const size_t blocks = (inner + kColumns - 1) / kColumns;
        pieces(io, outer * blocks, 1, [&](size_t index, size_t) {
          const size_t column = index % blocks * kColumns;
          const size_t start = index / blocks * n * inner + column;
          T sums[kColumns];
          loop(dx.data() + start, from.data() + start, result.data() + start, n, inner,
               std::min(kColumns, inner - column), sums);
        });
      }
      dx.finish();
    });
  };
}

Compute softmax_grad(const Attributes& attributes, size_t) {
  return softmax(
      attributes.integer("axis").value_or(-1),
      [](const auto& loops) { return loops.softmax_grad; },
      [](const auto& loops) { return loops.softmax_grad_columns; });
}

Compute log_softmax_grad(const Attributes& attributes, size_t) {
  return softmax(
      attributes.integer("axis").value_or(-1),
      [](const auto& loops) { return loops.log_softmax_grad; },
      [](const auto& loops) { return loops.log_softmax_grad_columns; });
}

void expect_count(const Tensor& tensor, const char* name, size_t count, const char* what) {
  if (tensor.count() != count) {
    throw std::invalid_argument(std::string(name) + " has shape " + to_text(tensor.shape) +
                                ", expected " + std::to_string(count) + " elements, " + what);
  }
}

Compute layer_norm_grad(const Attributes& attributes, size_t outputs) {
  const int64_t axis = attributes.integer("axis").value_or(-1);
  return [=](const Io& io) {
    const Tensor dy = io.input(0);
    const Tensor x = io.input(1);
    const Tensor scale = io.input(2);
    const Tensor mean = io.input(3);
    const Tensor inv_std = io.input(4);
    expect_like(dy, "dy", x, "x");
    expect_type(scale, "scale", x.type);
    const size_t at = axis_of(x.shape, axis);
    const size_t rows = product(x.shape, 0, at);
    const size_t n = product(x.shape, at, x.shape.size());
    expect_count(scale, "scale", n, "one for each in a row");
    expect_count(mean, "mean", rows, "one for each row");
    expect_count(inv_std, "inv_std", rows, "one for each row");
    with_real(x, "x", [&](auto zero) {
      using T = decltype(zero);
      const Reader<T> from(dy, "dy");
      const Reader<T> at_x(x, "x");
      const Reader<T> factor(scale, "scale");
      const Reader<T> means(mean, "mean");
      const Reader<T> inverse(inv_std, "inv_std");
      Writer<T> dx(io, 0, x.shape, x.type);
      // Each block of rows sums for itself, and the blocks are added in order.
      constexpr size_t kBlocks = 64;
      const size_t block =
          std::max({size_t{1}, kPiece / std::max<size_t>(n, 1), (rows + kBlocks - 1) / kBlocks});
      const size_t blocks = (rows + block - 1) / block;
      std::vector<T> sums(2 * n * std::max<size_t>(blocks, 1));
      const auto& loops = simd().of<T>();
      pieces(io, rows, block, [&](size_t begin, size_t count) {
        T* dscale = sums.data() + begin / block * 2 * n;
        for (size_t row = begin; row < begin + count; ++row) {
          const size_t start = row * n;
          loops.layer_norm_grad(dx.data() + start, dscale, dscale + n, from.data() + start,
                                at_x.data() + start, factor.data(), means.data()[row],
                                inverse.data()[row], n);
        }
      });
      dx.finish();
      for (size_t i = 1; i < blocks; ++i) loops.add(sums.data(), sums.data() + i * 2 * n, 2 * n);
      for (size_t output = 1; output < outputs; ++output) {
        Writer<T> out(io, output, scale.shape, scale.type);
        if (out.data() == nullptr) continue;
        std::copy_n(sums.data() + (output - 1) * n, n, out.data());
        out.finish();
      }
    });
  };
}

enum class LossReduction { kMean, kSum, kNone };

LossReduction loss_reduction(const Attributes& attributes) {
  const std::string name = attributes.text("reduction").value_or("mean");
  if (name == "mean") return LossReduction::kMean;
  if (name == "sum") return LossReduction::kSum;
  if (name == "none") return LossReduction::kNone;
  throw std::invalid_argument("reduction is '" + name + "', expected mean, sum or none");
}

constexpr int64_t kIgnored = -1;

// The class of each label, kIgnored for those that do not count.
std::vector<int64_t> classes_of(const Tensor& labels, int64_t classes,
                                std::optional<int64_t> ignore_index) {
  std::vector<int64_t> values = labels.integers();
  for (size_t i = 0; i < values.size(); ++i) {
    if (ignore_index && values[i] == *ignore_index) {
      values[i] = kIgnored;
    } else if (values[i] < 0 || values[i] >= classes) {
      throw std::invalid_argument("label " + std::to_string(i) + " is " +
                                  std::to_string(values[i]) + ", expected one of " +
                                  std::to_string(classes) + " classes");
    }
  }
  return values;
}

// d loss / d (x of this label's class) is factor * (probability - 1).
template <class T>
std::vector<T> label_factors(const std::vector<int64_t>& classes, const Tensor& dloss,
                             const T* weights, LossReduction reduction) {
  std::vector<T> factors(classes.size());
  double total = 0;
  for (size_t i = 0; i < classes.size(); ++i) {
    if (classes[i] == kIgnored) continue;
    factors[i] = weights == nullptr ? T(1) : weights[classes[i]];
    total += static_cast<double>(factors[i]);
  }
  if (reduction == LossReduction::kNone) {
    const Reader<T> each(dloss, "dloss");
    for (size_t i = 0; i < factors.size(); ++i) factors[i] *= each.data()[i];
    return factors;
  }
  double all = scalar(dloss, "dloss");
  if (reduction == LossReduction::kMean) all = total == 0 ? 0 : all / total;
  for (T& factor : factors) factor *= static_cast<T>(all);
  return factors;
}

Compute loss_grad(const Attributes& attributes, size_t) {
  const LossReduction reduction = loss_reduction(attributes);
  const std::optional<int64_t> ignore_index = attributes.integer("ignore_index");
  return [=](const Io& io) {
    const Tensor dloss = io.input(0);
    const Tensor log_prob = io.input(1);
    const Tensor labels = io.input(2);
    const bool weighted = io.inputs() > 3;
    const Tensor weights = weighted ? io.input(3) : Tensor{};
    if (log_prob.shape.size() < 2) {
      throw std::invalid_argument("log_prob has shape " + to_text(log_prob.shape) +
                                  ", expected [N, C, ...]");
    }
    Shape expected = log_prob.shape;
    expected.erase(expected.begin() + 1);
    if (labels.shape != expected) {
      throw std::invalid_argument("labels has shape " + to_text(labels.shape) + ", expected " +
                                  to_text(expected) + " for log_prob of shape " +
                                  to_text(log_prob.shape));
    }
    if (reduction == LossReduction::kNone && dloss.shape != labels.shape) {
      throw std::invalid_argument("dloss has shape " + to_text(dloss.shape) + ", expected " +
                                  to_text(labels.shape) + " as labels");
    }
    const size_t classes = static_cast<size_t>(log_prob.shape[1]);
    if (weighted) {
      expect_type(weights, "weights", log_prob.type);
      expect_count(weights, "weights", classes, "one for each class");
    }
    const size_t inner = product(log_prob.shape, 2, log_prob.shape.size());
    const std::vector<int64_t> targets =
        classes_of(labels, static_cast<int64_t>(classes), ignore_index);
    with_real(log_prob, "log_prob", [&](auto zero) {
      using T = decltype(zero);
      const Reader<T> y(log_prob, "log_prob");
      std::vector<T> factors;
      if (weighted) {
        factors = label_factors(targets, dloss, Reader<T>(weights, "weights").data(), reduction);
      } else {
        factors = label_factors<T>(targets, dloss, nullptr, reduction);
      }
      Writer<T> dx(io, 0, log_prob.shape, log_prob.type);
      if (log_prob.count() == 0) return;
      const auto& loops = simd().of<T>();
      if (inner == 1) {
        pieces(io, targets.size(), std::max<size_t>(1, kPiece / classes),
               [&](size_t begin, size_t rows) {
                 for (size_t row = begin; row < begin + rows; ++row) {
                   T* to = dx.data() + row * classes;
                   if (targets[row] == kIgnored) {
                     std::memset(to, 0, classes * sizeof(T));
                     continue;
                   }
                   loops.scaled_exp(to, y.data() + row * classes, factors[row], classes);
                   to[targets[row]] -= factors[row];
                 }
               });
      } else {
        const size_t samples = static_cast<size_t>(log_prob.shape[0]);
        pieces(io, samples * classes, std::max<size_t>(1, kPiece / inner),
               [&](size_t begin, size_t rows) {
                 for (size_t row = begin; row < begin + rows; ++row) {
                   loops.scaled_exp_each(dx.data() + row * inner, y.data() + row * inner,
                                         factors.data() + row / classes * inner, inner);
                 }
               });
        for (size_t i = 0; i < targets.size(); ++i) {
          if (targets[i] == kIgnored) continue;
          const size_t row = i / inner * classes + static_cast<size_t>(targets[i]);
          dx.data()[row * inner + i % inner] -= factors[i];
        }
      }
      dx.finish();
    });
  };
}

}  // namespace

const std::vector<KernelSpec>& row_kernels() {
  static const std::vector<KernelSpec> all = {
      {"SoftmaxGrad", {kAny, kAny}, 0, false, {0}, false, in_place<0>, softmax_grad},
      {"LogSoftmaxGrad", {kAny, kAny}, 0, false, {0}, false, in_place<0>, log_softmax_grad},
      {"LayerNormalizationGrad",
       {kAny, kAny, kAny, kAny, kAny},
       0,
       false,
       {1, 2, 2},
       true,
       in_place<0>,
       layer_norm_grad},
      {"SoftmaxCrossEntropyLossGrad",
       {kAny, kAny, kInt64, kAny},
       1,
       false,
       {1},
       false,
       never_in_place,
       loss_grad},
  };
  return all;
}

}  // namespace onnxpar
