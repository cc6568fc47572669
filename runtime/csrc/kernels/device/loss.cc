// Softmax cross-entropy and its gradient, on a GPU.
#include "kernels/checks.h"
#include "kernels/device/kernels.h"
#include "kernels/device/queue.h"

namespace onnxpar::cuda {
namespace {

// As in device/loss.cu.
struct Labels {
  const void* of;
  const void* weights;
  Index count;
  Index classes;
  Index inner;
  Index ignore;
  bool ignores;
};

struct Results {
  void* each;
  double* values;
  double* weights;
};

struct Factor {
  const void* dloss;
  int dloss_type;
  int reduction;
  const double* total;
};

Labels labels_of(const Labelled& l, std::optional<int64_t> ignore_index) {
  return {l.labels.data,
          l.weights ? l.weights->data : nullptr,
          static_cast<Index>(l.labels.count()),
          static_cast<Index>(l.classes),
          static_cast<Index>(l.inner),
          ignore_index.value_or(0),
          ignore_index.has_value()};
}

std::shared_ptr<FaultReport> label_faults(const char* op, const KernelAttributes& attributes) {
  return std::make_shared<FaultReport>(std::string(op) + " '" + attributes.node() + "'", "label",
                                       "classes");
}

}  // namespace

Compute loss(const KernelAttributes& attributes, size_t outputs) {
  const LossReduction reduction = loss_reduction(attributes);
  const std::optional<int64_t> ignore_index = attributes.integer("ignore_index");
  const auto faults = label_faults("SoftmaxCrossEntropyLoss", attributes);
  return [=](const Io& io) {
    const Labelled l = loss_inputs(io);
    Fault* fault = faults->next(io.stream(), l.classes);
    const Labels labels = labels_of(l, ignore_index);
    const size_t count = l.labels.count();
    Queue queue(io, "loss.cu", l.scores.type);
    const bool each = reduction == LossReduction::kNone;
    void* out = io.output(0, each ? l.labels.shape : Shape{});
    void* log_prob = outputs > 1 ? io.output(1, l.scores.shape) : nullptr;
    Results to{each ? out : nullptr, nullptr, nullptr};
    if (!each) {
      to.values = queue.scratch<double>(2 * count);
      to.weights = to.values + count;
    }
    if (l.inner == 1) {
      const Team team = team_for(count, l.classes);
      queue.launch((std::string("loss") + team.suffix).c_str(), team.grid, to, log_prob,
                   l.scores.data, labels, fault);
    } else {
      queue.launch("loss_columns", over(count), to, log_prob, l.scores.data, labels, fault);
    }
    if (each) return;
    queue.launch("loss_total", {1}, out, to.values, to.weights, labels.count,
                 static_cast<int>(reduction));
  };
}

Compute loss_grad(const KernelAttributes& attributes, size_t) {
  const LossReduction reduction = loss_reduction(attributes);
  const std::optional<int64_t> ignore_index = attributes.integer("ignore_index");
  const auto faults = label_faults("SoftmaxCrossEntropyLossGrad", attributes);
  return [=](const Io& io) {
    const LossGrad g = loss_grad_inputs(io, reduction);
    const Labelled& l = g.of;
    Fault* fault = faults->next(io.stream(), l.classes);
    const Labels labels = labels_of(l, ignore_index);
    const size_t count = l.labels.count();
    Queue queue(io, "loss.cu", l.scores.type);
    void* dx = io.output(0, l.scores.shape);
    Factor factor{g.dloss.data, static_cast<int>(g.dloss.type), static_cast<int>(reduction),
                  nullptr};
    if (reduction == LossReduction::kMean) {
      double* total = queue.scratch<double>(1);
      queue.launch("loss_grad_total", {1}, total, labels, fault);
      factor.total = total;
    }
    if (l.inner == 1) {
      queue.launch("loss_grad_rows", teams(count), dx, factor, l.scores.data, labels, fault);
    } else {
      queue.launch("loss_grad_columns", over(l.scores.count()), dx, factor, l.scores.data, labels,
                   fault);
    }
  };
}

}  // namespace onnxpar::cuda
