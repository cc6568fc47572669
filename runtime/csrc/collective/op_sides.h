// The kernels that are the same for tensors in host memory and on the rank's GPU. A `Side` has the
// differences: `enter`, which begins a call, throws once the world was closed, and returns the stream
// of the tensors; `transport` and `memory`, for collectives; and `token`.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective/call_log.h"
#include "collective/op_kernel.h"

namespace onnxpar {

// (X, token; group, the operator's attributes) -> (Y, token), or a Bucket:
// (token, X…; op, group, its attributes, values) -> (token, Y…). `values` has the names of the tensors,
// joined by "; ". `before` is the number of inputs before the tensors of a node that has several, or 0.
template <class Side>
class CollectiveKernel : public Side {
 public:
  CollectiveKernel(const Node& node, Collective collective, Lane lane, size_t before = 0)
      : Side(node, collective.where),
        collective_(std::move(collective)),
        lane_(lane),
        before_(before) {
    require_member(*node.rank, collective_);
  }

  std::string describe() const override {
    return this->at(this->where_) + " on group " + to_text(collective_.group);
  }

  void compute(const Io& io) override {
    const Stream stream = this->enter(io);
    const size_t end = before_ != 0 ? io.inputs() : 1;
    const DType type = io.input(before_).type;
    int64_t sent = 0;
    std::vector<Operand> operands;
    for (size_t i = before_; i < end; ++i) {
      const Tensor x = io.input(i);
      const size_t number = result_of(i);
      require_type(x, type);
      sent += sent_with(x);
      if (taken(io, number, x, stream)) continue;
      operands.push_back({x.data, io.output(number, output_shape(collective_, x.shape)), x.shape});
    }
    if (!operands.empty()) run(operands, type, stream);
    count(sent);
    this->token(io, before_ != 0 ? 0 : 1);
  }

 protected:
  // The number of the output with the result of an input.
  size_t result_of(size_t input) const { return before_ != 0 ? input - before_ + 1 : 0; }
  // Whether this tensor's result was there already, and is now in the output with this number.
  virtual bool taken(const Io&, size_t, const Tensor&, Stream) { return false; }
  void run(const List<Operand>& operands, DType type, Stream stream, bool behind = false) {
    execute(this->transport(), group(), collective_, operands, type, this->memory(lane_), stream,
            this->rank_.calls(), behind);
  }
  // Made at the first call and not with the kernel: making it is a collective of the members too, and
  // only calls have the same order on all ranks.
  Group& group() {
    if (group_ == nullptr) {
      const CallLog::Entry entry(this->rank_.calls(), CallKind::kSetUp, collective_.where,
                                 collective_.group, lane_, 0, 0);
      group_ = &this->transport().group(collective_.group, lane_);
    }
    return *group_;
  }
  // The bytes that this rank sends for a tensor.
  int64_t sent_with(const Tensor& x) {
    return bytes_sent(collective_, group().index, static_cast<int64_t>(x.bytes()));
  }
  void count(int64_t sent) { this->rank_.count(collective_.op, sent); }

  const Collective collective_;

 private:
  const Lane lane_;
  const size_t before_;
  Group* group_ = nullptr;
};

// Send(X, token; peer, tag) -> token
template <class Side>
class SendKernel : public Side {
 public:
  explicit SendKernel(const Node& node) : Side(node, where_of(Op::kSend, node)), peer_(node) {}

  void compute(const Io& io) override {
    const Stream stream = this->enter(io);
    const Tensor x = io.input(0);
    const auto bytes = static_cast<int64_t>(x.bytes());
    {
      CallLog::Entry entry(this->rank_.calls(), CallKind::kSend, this->where_,
                           {this->rank_.rank(), peer_.rank}, Lane::kMain, peer_.tag, bytes);
      entry.on(stream);
      this->transport().send(Call(this->where_), peer_.rank, peer_.tag, x.data, x.bytes(), stream);
    }
    this->rank_.count(Op::kSend, bytes);
    this->token(io, 0);
  }

 private:
  const Peer peer_;
};

// Recv(shape, token; peer, tag, dtype) -> (Y, token)
template <class Side>
class RecvKernel : public Side {
 public:
  explicit RecvKernel(const Node& node)
      : Side(node, where_of(Op::kRecv, node)),
        peer_(node),
        type_(dtype_from_onnx(node.attributes.need_integer("dtype"))) {}

  void compute(const Io& io) override {
    const Stream stream = this->enter(io);
    const Shape shape = io.input(0).integers();
    const size_t bytes = bytes_of(shape, type_);
    void* out = io.output(0, shape);
    const Call call(this->where_);
    {
      CallLog::Entry entry(this->rank_.calls(), CallKind::kRecv, this->where_,
                           {peer_.rank, this->rank_.rank()}, Lane::kMain, peer_.tag,
                           static_cast<int64_t>(bytes));
      entry.follow(call);
      entry.on(stream);
      this->transport().recv(call, peer_.rank, peer_.tag, out, bytes, Lane::kMain, stream);
    }
    this->rank_.count(Op::kRecv, 0);
    this->token(io, 1);
  }

 private:
  const Peer peer_;
  const DType type_;
};

// The kernel of an operator on one side, of the classes that this side alone has. Throws
// std::invalid_argument if the attributes are wrong.
template <class Side, class Barrier, class Start, class StartAhead, class Wait, class FinishLater,
          class Finish, class Foreground>
std::unique_ptr<Kernel> make_kernel(Op op, const Node& node) {
  const auto collective = [&] { return collective_of(op, node); };
  switch (op) {
    case Op::kSend: return std::make_unique<SendKernel<Side>>(node);
    case Op::kRecv: return std::make_unique<RecvKernel<Side>>(node);
    case Op::kBarrier: return std::make_unique<Barrier>(node, where_of(op, node));
    case Op::kStart: return std::make_unique<Start>(node, collective(), Lane::kAsync);
    case Op::kStartAhead: return std::make_unique<StartAhead>(node, collective(), Lane::kAsync);
    case Op::kWait: return std::make_unique<Wait>(node, collective(), Lane::kAsync);
    case Op::kFinishLater: return std::make_unique<FinishLater>(node, collective());
    case Op::kFinish: return std::make_unique<Finish>(node, where_of(op, node));
    default:
      return std::make_unique<Foreground>(node, collective(), Lane::kMain,
                                          op == Op::kBucket ? 1 : 0);
  }
}

}  // namespace onnxpar
