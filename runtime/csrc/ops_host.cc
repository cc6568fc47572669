// The operators for tensors in host memory.
#include <cstring>
#include <stdexcept>

#include "op_kernel.h"
#include "philox.h"

namespace onnxpar {
namespace {

class HostKernel : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  void token(const Io& io, size_t index) const {
    if (has_output(index)) io.token(index);
  }
};

class CollectiveKernel : public HostKernel {
 public:
  CollectiveKernel(RankContext& rank, Collective collective, Lane lane)
      : HostKernel(rank, collective.where), collective_(std::move(collective)), lane_(lane) {
    require_member(rank, collective_);
  }

  std::string describe() const override {
    return at(where_) + " on group " + to_text(collective_.group);
  }

  void compute(const Io& io) override {
    Group& group = this->group();
    const Tensor x = io.input(0);
    const bool kept = collective_.op == Op::kAllReduce || collective_.op == Op::kBroadcast;
    void* out = kept ? io.output(0, x.shape) : io.output(0, output_shape(collective_, x.shape));
    execute(rank_.transport(), group, collective_, x.data, out, x.shape, x.type, rank_.memory(),
            nullptr);
    count(x);
    token(io, 1);
  }

 protected:
  // Made at the first call and not with the kernel, since making it is a collective of the members
  // too, and only calls have an order that all ranks share.
  Group& group() {
    Transport& transport = rank_.transport();
    if (group_ == nullptr) group_ = &transport.group(collective_.group, lane_);
    return *group_;
  }
  void count(const Tensor& x) {
    rank_.count(collective_.op,
                bytes_sent(collective_, group_->index, static_cast<int64_t>(x.bytes())));
  }

  const Collective collective_;
  const Lane lane_;
  Group* group_ = nullptr;
};

// Start(X, token; op, its attributes) -> (handle, token)
class StartKernel : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;
  ~StartKernel() override { rank_.drain(numbers_); }

  void compute(const Io& io) override {
    auto request = std::make_shared<Request>();
    request->group = &group();
    const Tensor x = io.input(0);
    size_t bytes = dtype_size(x.type);
    for (int64_t dim : output_shape(collective_, x.shape)) bytes *= static_cast<size_t>(dim);
    request->collective = collective_;
    request->in = x.data;
    request->input = x.shape;
    request->type = x.type;
    request->result.reset(new std::byte[bytes]);
    request->result_bytes = bytes;
    const int64_t number = rank_.start(std::move(request));
    // Waits of earlier runs are over, or never come: one run of a session ends before the next.
    numbers_.push_back(number);
    if (numbers_.size() > 1) {
      rank_.drain({numbers_.front()});
      numbers_.erase(numbers_.begin());
    }
    count(x);
    *static_cast<int64_t*>(io.output(0, {1})) = number;
    token(io, 1);
  }

 private:
  std::vector<int64_t> numbers_;
};

// Wait(handle, X; the attributes of Start) -> Y. X is an input only to stay alive until here.
class WaitKernel : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

  void compute(const Io& io) override {
    const std::vector<int64_t> handle = io.input(0).integers();
    const std::shared_ptr<Request> request = rank_.wait(handle.at(0), where_);
    const Tensor x = io.input(1);
    if (request->in != x.data || request->input != x.shape) {
      throw std::invalid_argument("its second input is not the tensor that was given to Start");
    }
    const Shape shape = output_shape(collective_, x.shape);
    if (shape != output_shape(request->collective, x.shape)) {
      throw std::invalid_argument("its attributes differ from those of " +
                                  request->collective.where);
    }
    void* out = io.output(0, shape);
    if (request->result_bytes != 0) {
      std::memcpy(out, request->result.get(), request->result_bytes);
    }
  }
};

// Send(X, token; peer, tag) -> token
class SendKernel : public HostKernel {
 public:
  SendKernel(RankContext& rank, const std::string& where, const Attributes& attributes)
      : HostKernel(rank, where), peer_(rank, attributes) {}
  void compute(const Io& io) override {
    const Tensor x = io.input(0);
    rank_.transport().send(Call(where_), peer_.rank, peer_.tag, x.data, x.bytes(), nullptr);
    rank_.count(Op::kSend, static_cast<int64_t>(x.bytes()));
    token(io, 0);
  }

 private:
  const Peer peer_;
};

// Recv(shape, token; peer, tag, dtype) -> (Y, token)
class RecvKernel : public HostKernel {
 public:
  RecvKernel(RankContext& rank, const std::string& where, const Attributes& attributes)
      : HostKernel(rank, where),
        peer_(rank, attributes),
        type_(dtype_from_onnx(static_cast<int>(attributes.need_integer("dtype")))) {}
  void compute(const Io& io) override {
    const Shape shape = io.input(0).integers();
    const size_t bytes = bytes_of(shape, type_);
    void* out = io.output(0, shape);
    rank_.transport().recv(Call(where_), peer_.rank, peer_.tag, out, bytes, Lane::kMain, nullptr);
    rank_.count(Op::kRecv, 0);
    token(io, 1);
  }

 private:
  const Peer peer_;
  const DType type_;
};

// Barrier(X, after…) -> X. Its output is a new value to onnxruntime, so that nothing is merged
// across it, and is there only when the further inputs are.
class BarrierKernel : public HostKernel {
 public:
  using HostKernel::HostKernel;
  void compute(const Io& io) override {
    const Tensor x = io.input(0);
    void* out = io.output(0, x.shape);
    if (out != nullptr && out != x.data && x.bytes() != 0) std::memcpy(out, x.data, x.bytes());
  }
};

// Philox(key, shape, global_shape, start; distribution) -> Y
class PhiloxKernel : public HostKernel {
 public:
  PhiloxKernel(RankContext& rank, const std::string& where, const Attributes& attributes)
      : HostKernel(rank, where), distribution_(philox_distribution(attributes)) {}
  void compute(const Io& io) override {
    const Shape shape = io.input(1).integers();
    bytes_of(shape, DType::kFloat32);
    philox_fill(static_cast<float*>(io.output(0, shape)), io.input(0).integers(), shape,
                io.input(2).integers(), io.input(3).integers(), distribution_);
  }

 private:
  const Distribution distribution_;
};

}  // namespace

std::unique_ptr<Kernel> make_host_kernel(Op op, RankContext& rank,
                                         const KernelAttributes& attributes) {
  const std::string where = std::string(op_name(op)) + " '" + attributes.node() + "'";
  const auto collective = [&] { return collective_of(op, rank, attributes); };
  switch (op) {
    case Op::kSend: return std::make_unique<SendKernel>(rank, where, attributes);
    case Op::kRecv: return std::make_unique<RecvKernel>(rank, where, attributes);
    case Op::kBarrier: return std::make_unique<BarrierKernel>(rank, where);
    case Op::kPhilox: return std::make_unique<PhiloxKernel>(rank, where, attributes);
    case Op::kStart: return std::make_unique<StartKernel>(rank, collective(), Lane::kAsync);
    case Op::kWait: return std::make_unique<WaitKernel>(rank, collective(), Lane::kAsync);
    default: return std::make_unique<CollectiveKernel>(rank, collective(), Lane::kMain);
  }
}

}  // namespace onnxpar
