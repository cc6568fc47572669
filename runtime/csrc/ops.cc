#include "ops.h"

#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <stdexcept>

#include "kernels.h"
#include "ort_io.h"
#include "philox.h"

namespace onnxpar {
namespace {

constexpr int kAny = 0;
constexpr int kToken = static_cast<int>(DType::kUint8);
constexpr int kInt64 = static_cast<int>(DType::kInt64);
constexpr int kFloat = static_cast<int>(DType::kFloat32);

struct Port {
  int type;
  int characteristic = ort::kRequired;
};

struct Signature {
  Op op;
  std::vector<Port> inputs;
  std::vector<Port> outputs;
  bool inplace;  // output 0 may take the memory of input 0
};

const std::vector<Signature>& signatures() {
  const Port x{kAny};
  const Port integers{kInt64};
  const Port token{kToken, ort::kOptional};
  const Port many{kAny, ort::kVariadic};
  static const std::vector<Signature> all = {
      {Op::kAllReduce, {x, token}, {x, token}, true},
      {Op::kAllGather, {x, token}, {x, token}, false},
      {Op::kReduceScatter, {x, token}, {x, token}, false},
      {Op::kAllToAll, {x, token}, {x, token}, false},
      {Op::kBroadcast, {x, token}, {x, token}, true},
      {Op::kPermute, {x, token}, {x, token}, false},
      {Op::kSend, {x, token}, {{kToken}}, false},
      {Op::kRecv, {integers, token}, {x, token}, false},
      {Op::kBarrier, {x, many}, {x}, true},
      {Op::kStart, {x, token}, {integers, token}, false},
      {Op::kWait, {integers, x}, {x}, false},
      {Op::kPhilox, {integers, integers, integers, integers}, {{kFloat}}, false},
  };
  return all;
}

struct CustomOp : ort::CustomOp {
  const Signature* signature;
  RankContext* rank;
};

const CustomOp& self(const ort::CustomOp* op) { return *static_cast<const CustomOp*>(op); }

class Kernel {
 public:
  Kernel(RankContext& rank, std::string where) : rank_(rank), where_(std::move(where)) {}
  // Whether the node uses its optional last output, the token.
  void set_outputs(size_t outputs) { outputs_ = outputs; }
  virtual ~Kernel() = default;
  virtual void compute(const Io& io) = 0;
  virtual std::string describe() const { return at(where_); }

 protected:
  std::string at(const std::string& where) const {
    return "rank " + std::to_string(rank_.rank()) + ": " + where;
  }
  static Stream stream(const Transport& transport, const Io& io) {
    return transport.on_device() ? io.stream() : nullptr;
  }
  void token(const Io& io, size_t index) const {
    if (index < outputs_) io.token(index);
  }
  RankContext& rank_;
  const std::string where_;

 private:
  size_t outputs_ = 0;
};

class CollectiveKernel : public Kernel {
 public:
  CollectiveKernel(RankContext& rank, Collective collective, Lane lane)
      : Kernel(rank, collective.where), collective_(std::move(collective)), lane_(lane) {
    for (int member : collective_.group) member_ = member_ || member == rank.rank();
    if (!member_) {
      throw std::invalid_argument("rank " + std::to_string(rank.rank()) +
                                  " is not in its group " + to_text(collective_.group));
    }
  }

  std::string describe() const override {
    return at(where_) + " on group " + to_text(collective_.group);
  }

  void compute(const Io& io) override {
    Group& group = this->group();
    const Tensor x = io.input(0);
    const bool kept = collective_.op == Op::kAllReduce || collective_.op == Op::kBroadcast;
    void* out = kept ? io.output(0, x.shape) : io.output(0, output_shape(collective_, x.shape));
    Transport& transport = rank_.transport();
    execute(transport, group, collective_, x.data, out, x.shape, x.type, rank_.scratch(),
            stream(transport, io));
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
  bool member_ = false;
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

class PeerKernel : public Kernel {
 public:
  PeerKernel(RankContext& rank, const std::string& where, const Attributes& attributes)
      : Kernel(rank, where),
        peer_(static_cast<int>(attributes.need_integer("peer"))),
        tag_(static_cast<int>(attributes.integer("tag").value_or(0))) {
    if (peer_ < 0 || peer_ >= rank.size() || peer_ == rank.rank()) {
      throw std::invalid_argument("peer is " + std::to_string(peer_) +
                                  ", expected another rank of a world of " +
                                  std::to_string(rank.size()));
    }
    if (tag_ < 0) {
      throw std::invalid_argument("tag is " + std::to_string(tag_) + ", expected 0 or more");
    }
  }

 protected:
  const int peer_;
  const int tag_;
};

// Send(X, token; peer, tag) -> token
class SendKernel : public PeerKernel {
 public:
  using PeerKernel::PeerKernel;
  void compute(const Io& io) override {
    const Tensor x = io.input(0);
    Transport& transport = rank_.transport();
    transport.send(Call(where_), peer_, tag_, x.data, x.bytes(), stream(transport, io));
    rank_.count(Op::kSend, static_cast<int64_t>(x.bytes()));
    token(io, 0);
  }
};

// Recv(shape, token; peer, tag, dtype) -> (Y, token)
class RecvKernel : public PeerKernel {
 public:
  RecvKernel(RankContext& rank, const std::string& where, const Attributes& attributes)
      : PeerKernel(rank, where, attributes),
        type_(dtype_from_onnx(static_cast<int>(attributes.need_integer("dtype")))) {}
  void compute(const Io& io) override {
    const Shape shape = io.input(0).integers();
    size_t bytes = dtype_size(type_);
    for (int64_t dim : shape) {
      if (dim < 0) throw std::invalid_argument("shape " + to_text(shape) + " has a negative dim");
      bytes *= static_cast<size_t>(dim);
    }
    void* out = io.output(0, shape);
    Transport& transport = rank_.transport();
    transport.recv(Call(where_), peer_, tag_, out, bytes, Lane::kMain, stream(transport, io));
    rank_.count(Op::kRecv, 0);
    token(io, 1);
  }

 private:
  const DType type_;
};

// Barrier(X, after…) -> X. Its output is a new value to onnxruntime, so that nothing is merged
// across it, and is there only when the further inputs are.
class BarrierKernel : public Kernel {
 public:
  using Kernel::Kernel;
  void compute(const Io& io) override {
    const Tensor x = io.input(0);
    void* out = io.output(0, x.shape);
    if (out != nullptr && out != x.data && x.bytes() != 0) std::memcpy(out, x.data, x.bytes());
  }
};

// Philox(key, shape, global_shape, start; distribution) -> Y
class PhiloxKernel : public Kernel {
 public:
  PhiloxKernel(RankContext& rank, const std::string& where, const Attributes& attributes)
      : Kernel(rank, where) {
    const std::string name = attributes.text("distribution").value_or("uniform");
    if (name != "uniform" && name != "normal") {
      throw std::invalid_argument("distribution is '" + name + "', expected uniform or normal");
    }
    distribution_ = name == "normal" ? Distribution::kNormal : Distribution::kUniform;
    const int64_t type = attributes.integer("dtype").value_or(kFloat);
    if (type != kFloat) {
      throw std::invalid_argument("dtype is " + std::to_string(type) +
                                  ", expected 1 (float32); cast the result for others");
    }
  }
  void compute(const Io& io) override {
    const std::vector<int64_t> shape = io.input(1).integers();
    for (int64_t dim : shape) {
      if (dim < 0) throw std::invalid_argument("shape " + to_text(shape) + " has a negative dim");
    }
    philox_fill(static_cast<float*>(io.output(0, shape)), io.input(0).integers(), shape,
                io.input(2).integers(), io.input(3).integers(), distribution_);
  }

 private:
  Distribution distribution_ = Distribution::kUniform;
};

ort::Status* failure(int code, const std::string& message) {
  return api().create_status(code, message.c_str());
}

std::unique_ptr<Kernel> make_kernel(Op op, RankContext& rank, const KernelAttributes& attributes) {
  const std::string node = attributes.node();
  const std::string where = std::string(op_name(op)) + " '" + node + "'";
  const auto collective = [&](Op which) {
    Collective c = parse_collective(which, node, attributes, rank.size());
    if (which != op) c.where = where + " (" + op_name(which) + ")";
    return c;
  };
  const auto started = [&] {
    return collective(collective_from_name(attributes.text("op").value_or("")));
  };
  switch (op) {
    case Op::kSend: return std::make_unique<SendKernel>(rank, where, attributes);
    case Op::kRecv: return std::make_unique<RecvKernel>(rank, where, attributes);
    case Op::kBarrier: return std::make_unique<BarrierKernel>(rank, where);
    case Op::kPhilox: return std::make_unique<PhiloxKernel>(rank, where, attributes);
    case Op::kStart: return std::make_unique<StartKernel>(rank, started(), Lane::kAsync);
    case Op::kWait: return std::make_unique<WaitKernel>(rank, started(), Lane::kAsync);
    default: return std::make_unique<CollectiveKernel>(rank, collective(op), Lane::kMain);
  }
}

ort::Status* create_kernel(const ort::CustomOp* op, const void*, const ort::KernelInfo* info,
                           void** kernel) {
  const CustomOp& custom = self(op);
  const KernelAttributes attributes(info);
  const std::string name = op_name(custom.signature->op);
  std::string where = name;
  try {
    where += " '" + attributes.node() + "'";
    if (custom.rank == nullptr) {
      throw std::invalid_argument(
          "the session options were not registered with a rank (onnxpar_runtime.World, "
          "Rank.register)");
    }
    where = "rank " + std::to_string(custom.rank->rank()) + ": " + where;
    std::unique_ptr<Kernel> made = make_kernel(custom.signature->op, *custom.rank, attributes);
    made->set_outputs(attributes.outputs());
    *kernel = made.release();
    return nullptr;
  } catch (const std::exception& e) {
    return failure(ort::kInvalidArgument, where + ": " + e.what());
  }
}

ort::Status* compute(void* kernel, ort::KernelContext* context) {
  Kernel& k = *static_cast<Kernel*>(kernel);
  try {
    k.compute(Io(context));
    return nullptr;
  } catch (const std::invalid_argument& e) {
    return failure(ort::kInvalidArgument, k.describe() + ": " + e.what());
  } catch (const std::exception& e) {
    return failure(ort::kFail, e.what());
  }
}

// Shapes that can be told from the inputs' shapes and the attributes. What onnxruntime does not
// know it reports as no dims at all, like a scalar: then nothing is said.
ort::Status* infer_shape(const ort::CustomOp* op, ort::ShapeContext* context) {
  const CustomOp& custom = self(op);
  const Op kind = custom.signature->op;
  try {
    const SymbolicTensor token{kToken, {1}, {""}};
    if (kind == Op::kSend) infer_output(context, 0, token);
    if (kind == Op::kStart) infer_output(context, 0, {kInt64, {1}, {""}});
    if (kind == Op::kBarrier) {
      const SymbolicTensor x = inferred_input(context, 0);
      if (!x.shape.empty()) infer_output(context, 0, x);
    }
    const bool collective = kind <= Op::kPermute;
    if (!collective && kind != Op::kWait) return nullptr;
    const ShapeAttributes attributes(context);
    SymbolicTensor x = inferred_input(context, kind == Op::kWait ? 1 : 0);
    const int world = custom.rank == nullptr ? 0 : custom.rank->size();
    if (x.shape.empty() || world == 0) return nullptr;
    const Op which = collective ? kind : collective_from_name(attributes.text("op").value_or(""));
    const Collective c = parse_collective(which, "", attributes, world);
    const Shape shape = output_shape(c, x.shape);
    for (size_t i = 0; i < shape.size(); ++i) {
      const int64_t axis = static_cast<int64_t>(i);
      const auto is = [&](int64_t a) { return a == axis || a + static_cast<int64_t>(shape.size()) == axis; };
      const bool resized = which == Op::kAllGather || which == Op::kReduceScatter
                               ? is(c.axis)
                               : which == Op::kAllToAll && (is(c.axis) || is(c.concat_axis));
      if (resized) x.names[i].clear();
    }
    x.shape = shape;
    infer_output(context, 0, x);
    return nullptr;
  } catch (const std::exception& e) {
    return failure(ort::kInvalidArgument, std::string(op_name(kind)) + ": " + e.what());
  }
}

const Port& port(const std::vector<Port>& ports, size_t index) {
  // onnxruntime asks beyond the last for what a variadic port stands for.
  return ports[index < ports.size() ? index : ports.size() - 1];
}

CustomOp make_op(const Signature& signature, RankContext* rank) {
  CustomOp op{};
  op.version = ort::kVersion;
  op.signature = &signature;
  op.rank = rank;
  op.name = [](const ort::CustomOp* o) { return op_name(self(o).signature->op); };
  op.execution_provider = [](const ort::CustomOp*) -> const char* { return nullptr; };
  op.input_type = [](const ort::CustomOp* o, size_t i) {
    return port(self(o).signature->inputs, i).type;
  };
  op.input_type_count = [](const ort::CustomOp* o) { return self(o).signature->inputs.size(); };
  op.output_type = [](const ort::CustomOp* o, size_t i) {
    return port(self(o).signature->outputs, i).type;
  };
  op.output_type_count = [](const ort::CustomOp* o) { return self(o).signature->outputs.size(); };
  op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.input_characteristic = [](const ort::CustomOp* o, size_t i) {
    return port(self(o).signature->inputs, i).characteristic;
  };
  op.output_characteristic = [](const ort::CustomOp* o, size_t i) {
    return port(self(o).signature->outputs, i).characteristic;
  };
  op.input_memory = [](const ort::CustomOp* o, size_t i) {
    return port(self(o).signature->inputs, i).type == kAny ? ort::kMemoryDefault
                                                           : ort::kMemoryCpuInput;
  };
  op.variadic_input_min = [](const ort::CustomOp*) { return 0; };
  op.variadic_input_homogeneous = [](const ort::CustomOp*) { return 0; };
  op.variadic_output_min = [](const ort::CustomOp*) { return 1; };
  op.variadic_output_homogeneous = [](const ort::CustomOp*) { return 0; };
  op.create_kernel_v2 = create_kernel;
  op.compute_v2 = compute;
  op.infer_shape = infer_shape;
  op.start_version = [](const ort::CustomOp*) { return 1; };
  op.end_version = [](const ort::CustomOp*) { return 1; };
  return op;
}

// onnxruntime does not tell which operator it asks the in-place pairs of, so there is one function
// for operators that have the pair (0, 0) and one for those that have none.
size_t inplace_first(int** inputs, int** outputs) {
  *inputs = new int[1]{0};
  *outputs = new int[1]{0};
  return 1;
}
size_t inplace_none(int** inputs, int** outputs) {
  *inputs = nullptr;
  *outputs = nullptr;
  return 0;
}
void release_pairs(int* inputs, int* outputs) {
  delete[] inputs;
  delete[] outputs;
}

// Operators must outlive every session made with them, whose end nobody tells; they are kept.
std::deque<CustomOp>& kept_ops() {
  static auto* ops = new std::deque<CustomOp>();
  return *ops;
}
std::mutex& kept_mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}

}  // namespace

ort::Status* register_ops(ort::SessionOptions* options, RankContext* rank) {
  std::lock_guard lock(kept_mutex());
  ort::CustomOpDomain* domain = nullptr;
  if (ort::Status* status = api().create_domain("onnxpar", &domain)) return status;
  for (const Signature& signature : signatures()) {
    CustomOp& op = kept_ops().emplace_back(make_op(signature, rank));
    op.may_inplace = signature.inplace ? inplace_first : inplace_none;
    op.release_may_inplace = release_pairs;
    op.alias_map = inplace_none;
    op.release_alias_map = release_pairs;
    if (ort::Status* status = api().domain_add(domain, &op)) return status;
  }
  if (ort::Status* status = add_kernels(domain, rank)) return status;
  return api().add_domain(options, domain);
}

}  // namespace onnxpar
