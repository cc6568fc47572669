#include "kernels/loss.h"

namespace onnxpar {

using namespace cuda;

cuda::Labels LossRule::device_labels(const Labelled& of) const {
  return {static_cast<const Index*>(of.labels.data),
          of.weights ? of.weights->data : nullptr,
          static_cast<Index>(of.labels.count()),
          static_cast<Index>(of.classes),
          static_cast<Index>(of.inner),
          ignore_index_.value_or(0),
          ignore_index_.has_value()};
}

void Loss::device(const Io& io, const Operands& o) const {
  Fault* fault = faults_->next(io.stream(), o.of.classes);
  const Labels labels = device_labels(o.of);
  const void* scores = o.of.scores.data;
  const size_t count = o.of.labels.count();
  Queue queue(io, "loss.cu", o.of.scores.type);
  const bool each = reduction_ == LossReduction::kNone;
  Results to{each ? o.loss.data : nullptr, nullptr, nullptr};
  if (!each) {
    to.values = queue.scratch<double>(2 * count);
    to.weights = to.values + count;
  }
  if (o.of.inner == 1) {
    const Team team = team_for(count, o.of.classes);
    queue.launch((std::string("loss") + team.suffix).c_str(), team.grid, to, o.log_prob.data,
                 scores, labels, fault);
  } else {
    queue.launch("loss_columns", over(count), to, o.log_prob.data, scores, labels, fault);
  }
  if (each) return;
  queue.launch("loss_total", {1}, o.loss.data, to.values, to.weights, labels.count, reduction_);
}

void LossGrad::device(const Io& io, const Operands& o) const {
  Fault* fault = faults_->next(io.stream(), o.of.classes);
  const Labels labels = device_labels(o.of);
  const void* scores = o.of.scores.data;
  Queue queue(io, "loss.cu", o.of.scores.type);
  Factor factor{o.dloss.data, static_cast<int>(o.dloss.type), reduction_, nullptr};
  if (reduction_ == LossReduction::kMean) {
    double* total = queue.scratch<double>(1);
    queue.launch("loss_grad_total", {1}, total, labels, fault);
    factor.total = total;
  }
  if (o.of.inner == 1) {
    queue.launch("loss_grad_rows", teams(o.of.labels.count()), o.dx.data, factor, scores, labels,
                 fault);
  } else {
    queue.launch("loss_grad_columns", over(o.of.scores.count()), o.dx.data, factor, scores, labels,
                 fault);
  }
}

}  // namespace onnxpar
