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
    const std::shared_ptr<Request> request = requested(x.type);
    request->add(x.data, result, x.shape);
    start({result}, request);
    count(sent_with(x));
  }

 protected:
  // A request without operands.
  std::shared_ptr<Request> requested(DType type) {
    auto request = std::make_shared<Request>();
    request->group = &group();
    request->collective = collective_;
    request->type = type;
    return request;
  }

  void start(std::vector<const void*> keys, const std::shared_ptr<Request>& request) {
    keys_ = std::move(keys);
    started_ = request;
    rank_.start(keys_, request);
  }
  // Forgets what the last run has started and nobody has waited for.
  void forget() {
    for (const void* key : keys_) rank_.drop(key, started_);
    keys_.clear();
  }

 private:
  std::vector<const void*> keys_;  // of what the last run has started
  std::weak_ptr<Request> started_;
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
      const Operand& operand = request->operands[0];
      waited_shape(collective_, x, request->collective, operand.in, operand.input);
    }
    void* out = io.output(0, y.shape);
    if (out != nullptr && out != y.data && y.bytes() != 0) std::memcpy(out, y.data, y.bytes());
    token(io, 1);
  }
};

// StartAhead(token, run, X…; op, its attributes) -> token. Each X is the operand of a later node of
// that collective, in the same memory, which is a state: it takes the result. An AllReduce replaces X.
// All are one call.
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
    const std::shared_ptr<Request> request = requested(io.input(2).type);
    std::vector<const void*> keys;
    for (size_t i = 2; i < io.inputs(); ++i) {
      const Tensor x = io.input(i);
      require_type(x, request->type);
      if (collective_.op == Op::kAllReduce) {
        request->add(x.data, const_cast<void*>(x.data), x.shape);
      } else {
        const size_t bytes = bytes_of(output_shape(collective_, x.shape), x.type);
        request->add(x.data, rank_.background_bytes(bytes), x.shape);
      }
      keys.push_back(x.data);
    }
    start(keys, request);
  }
};

// A collective of the foreground. It may have been started ahead.
class ForegroundKernel : public CollectiveKernel<HostKernel> {
 public:
  using CollectiveKernel::CollectiveKernel;

 protected:
  bool taken(const Io& io, size_t number, const Tensor& x, Stream) override {
    const std::shared_ptr<Request> started = rank_.take(x.data);
    if (started == nullptr) return false;
    const size_t i = started->find(x.data);
    const Operand& operand = started->operands[i];
    const Shape shape =
        waited_shape(collective_, x, started->collective, operand.in, operand.input);
    void* out = io.output(number, shape);
    const size_t bytes = bytes_of(shape, x.type);
    if (out != operand.out && bytes != 0) std::memcpy(out, operand.out, bytes);
    started->kept[i] = {};
    return true;
  }
};

// FinishLater(token, run, X…; op, its attributes, order, last) -> (token, Y…). As a Bucket, unless
// `run` is not 0 and data travels while the rank computes: then the results are complete only behind
// the Finish of the next program that reads their memory. `order` is the place of the call among all
// of its program. The node with `first`, which the program runs first, forgets what a program has left
// that failed before its end; the node with `last`, which it runs last, starts them all.
class FinishLaterKernel : public ForegroundKernel {
 public:
  FinishLaterKernel(const Node& node, Collective collective)
      : ForegroundKernel(node, std::move(collective), Lane::kMain, 2),
        order_(node.attributes.need_integer("order")),
        first_(node.attributes.need_integer("first") != 0),
        last_(node.attributes.need_integer("last") != 0) {}
  ~FinishLaterKernel() override { forget(); }

  void compute(const Io& io) override {
    forget();
    if (first_) rank_.drop_held();
    if (io.input(1).integers().at(0) == 0 || !transport().overlaps(group())) {
      ForegroundKernel::compute(io);
      return;
    }
    auto request = std::make_shared<Request>();
    request->collective = collective_;
    request->group = &transport().group(collective_.group, Lane::kAsync);
    request->type = io.input(2).type;
    request->later = true;
    copies_.resize(io.inputs() - 2);
    int64_t sent = 0;
    for (size_t i = 2; i < io.inputs(); ++i) {
      const Tensor x = io.input(i);
      require_type(x, request->type);
      void* const out = io.output(result_of(i), output_shape(collective_, x.shape));
      sent += sent_with(x);
      if (out == nullptr) continue;  // no elements
      // The program frees its operand, and this one runs on.
      CountedBytes& copy = copies_[i - 2];
      if (copy.size() != x.bytes()) copy = rank_.background_bytes(x.bytes());
      std::memcpy(copy.get(), x.data, x.bytes());
      request->add(copy.get(), out, x.shape);
      keys_.push_back(out);
    }
    started_ = request;
    rank_.hold(order_, keys_, std::move(request));
    if (last_) rank_.start_held();
    count(sent);
    token(io, 0);
  }

 private:
  // Forgets what the last run has left and nobody has finished.
  void forget() {
    rank_.drop_held(order_);
    for (const void* key : keys_) rank_.drop(key, started_);
    keys_.clear();
  }

  const int64_t order_;
  const bool first_;
  const bool last_;
  std::vector<CountedBytes> copies_;
  std::vector<const void*> keys_;
  std::weak_ptr<Request> started_;
};

// Finish(X, after) -> X. X is a state that a FinishLater may still write. `after` is only an input so
// that the node runs behind it.
class FinishKernel : public HostKernel {
 public:
  using HostKernel::HostKernel;

  void compute(const Io& io) override {
    const Tensor x = io.input(0);
    rank_.take(x.data);
    void* const out = io.output(0, x.shape);
    if (out != nullptr && out != x.data) std::memcpy(out, x.data, x.bytes());
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
  return make_kernel<HostKernel, BarrierKernel, StartKernel, StartAheadKernel, WaitKernel,
                     FinishLaterKernel, FinishKernel, ForegroundKernel>(op, node);
}

std::unique_ptr<Kernel> make_host_collective(const Node& node, Collective collective) {
  return std::make_unique<ForegroundKernel>(node, std::move(collective), Lane::kMain);
}

}  // namespace onnxpar
