// The operators for tensors in host memory.
#include <cstring>

#include "collective/op_sides.h"

namespace onnxpar {
namespace {

class HostKernel : public RankKernel {
 public:
  using RankKernel::RankKernel;

 protected:
  Stream enter(const Io&) {
    transport();
    return nullptr;
  }
  Transport& transport() { return rank_.transport(); }
  Memory& memory(Lane) { return rank_.memory(); }
  void token(const Io& io, size_t index) const {
    if (has_output(index)) io.token(index);
  }
};

// Start(X, token; op, its attributes) -> (Y, token). Y is complete only behind a Wait.
class StartKernel : public CollectiveKernel<HostKernel> {
 public:
  using CollectiveKernel::CollectiveKernel;
  // After a run that failed before its Wait.
  ~StartKernel() override { forget(); }

  void compute(const Io& io) override {
    const Tensor x = io.input(0);
    const Shape shape = output_shape(collective_, x.shape);
    forget();
    void* const result = io.output(0, shape);
    token(io, 1);
    if (result == nullptr) return;  // no elements
    const std::shared_ptr<Request> request = requested(x);
    request->result = result;
    request->result_bytes = bytes_of(shape, x.type);
    start(result, request);
    count(x);
  }

 protected:
  // A request on `x`, without its result.
  std::shared_ptr<Request> requested(const Tensor& x) {
    auto request = std::make_shared<Request>();
    request->group = &group();
    request->collective = collective_;
    request->in = x.data;
    request->input = x.shape;
    request->type = x.type;
    return request;
  }

  void start(const void* key, const std::shared_ptr<Request>& request) {
    started_.emplace_back(key, request);
    rank_.start(key, request);
  }
  // Forgets what the last run has started and nobody has waited for.
  void forget() {
    for (const auto& [key, request] : started_) rank_.drop(key, request);
    started_.clear();
  }

 private:
  std::vector<std::pair<const void*, std::weak_ptr<Request>>> started_;  // in the last run, by key
};

// Wait(Y, X, token; the attributes of Start) -> (Y, token). X is only an input so that it is not freed
// before. The first output may be left out, if Y is an output of the graph itself.
class WaitKernel : public CollectiveKernel<HostKernel> {
 public:
  using CollectiveKernel::CollectiveKernel;

  void compute(const Io& io) override {
    const Tensor y = io.input(0);
    const Tensor x = io.input(1);
    const std::shared_ptr<Request> request = rank_.take(y.data);
    if (request == nullptr) {
      if (y.count() != 0) throw std::runtime_error(not_started());
    } else {
      waited_shape(collective_, x, request->collective, request->in, request->input);
    }
    void* out = io.output(0, y.shape);
    if (out != nullptr && out != y.data && y.bytes() != 0) std::memcpy(out, y.data, y.bytes());
    token(io, 1);
  }
};

// StartAhead(token, run, X…; op, its attributes) -> token. Each X is the operand of a later node of
// that collective, in the same memory, which is a state: it takes the result. An AllReduce replaces X.
// Nothing is started unless `run` is not 0 and data travels while the rank computes.
class StartAheadKernel : public StartKernel {
 public:
  using StartKernel::StartKernel;

  void compute(const Io& io) override {
    token(io, 0);
    forget();
    if (io.input(1).integers().at(0) == 0 ||
        !transport().overlaps(transport().group(collective_.group, Lane::kMain))) {
      return;
    }
    for (size_t i = 2; i < io.inputs(); ++i) {
      const Tensor x = io.input(i);
      const std::shared_ptr<Request> request = requested(x);
      if (collective_.op == Op::kAllReduce) {
        request->result = const_cast<void*>(x.data);
        request->result_bytes = x.bytes();
      } else {
        request->keep(bytes_of(output_shape(collective_, x.shape), x.type));
      }
      start(x.data, request);
    }
  }
};

// A collective of the foreground. It may have been started ahead.
class ForegroundKernel : public CollectiveKernel<HostKernel> {
 public:
  using CollectiveKernel::CollectiveKernel;

  void compute(const Io& io) override {
    enter(io);
    const Tensor x = io.input(0);
    const std::shared_ptr<Request> started = rank_.take(x.data);
    if (started == nullptr) return CollectiveKernel::compute(io);
    const Shape shape =
        waited_shape(collective_, x, started->collective, started->in, started->input);
    void* out = io.output(0, shape);
    if (out != started->result && started->result_bytes != 0) {
      std::memcpy(out, started->result, started->result_bytes);
    }
    group();
    count(x);
    token(io, 1);
  }
};

// Barrier(X, after…) -> X. Its output is a new value for onnxruntime, so that no nodes are merged
// across it, and is computed after the other inputs.
class BarrierKernel : public HostKernel {
 public:
  using HostKernel::HostKernel;
  void compute(const Io& io) override {
    const Tensor x = io.input(0);
    void* out = io.output(0, x.shape);
    if (out != nullptr && out != x.data && x.bytes() != 0) std::memcpy(out, x.data, x.bytes());
  }
};

}  // namespace

std::unique_ptr<Kernel> make_host_kernel(Op op, const Node& node) {
  const auto collective = [&] { return collective_of(op, node); };
  switch (op) {
    case Op::kSend: return std::make_unique<SendKernel<HostKernel>>(node);
    case Op::kRecv: return std::make_unique<RecvKernel<HostKernel>>(node);
    case Op::kBarrier: return std::make_unique<BarrierKernel>(node, where_of(op, node));
    case Op::kStart: return std::make_unique<StartKernel>(node, collective(), Lane::kAsync);
    case Op::kWait: return std::make_unique<WaitKernel>(node, collective(), Lane::kAsync);
    case Op::kStartAhead:
      return std::make_unique<StartAheadKernel>(node, collective(), Lane::kAsync);
    default: return std::make_unique<ForegroundKernel>(node, collective(), Lane::kMain);
  }
}

}  // namespace onnxpar
