#include "capi/ops.h"

#include <deque>
#include <mutex>
#include <stdexcept>

#include "collective/op_kernel.h"
#include "kernels/kernels.h"

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
  bool inplace;    // output 0 may take the memory of input 0
  bool alone;      // its kernel on a GPU needs nothing that a rank has there
};

const std::vector<Signature>& signatures() {
  const Port x{kAny};
  const Port integers{kInt64};
  const Port token{kToken, ort::kOptional};
  const Port many{kAny, ort::kVariadic};
  static const std::vector<Signature> all = {
      {Op::kAllReduce, {x, token}, {x, token}, true, false},
      {Op::kAllGather, {x, token}, {x, token}, false, false},
      {Op::kReduceScatter, {x, token}, {x, token}, false, false},
      {Op::kAllToAll, {x, token}, {x, token}, false, false},
      {Op::kBroadcast, {x, token}, {x, token}, true, false},
      {Op::kPermute, {x, token}, {x, token}, false, false},
      {Op::kSend, {x, token}, {{kToken}}, false, false},
      {Op::kRecv, {integers, token}, {x, token}, false, false},
      {Op::kBarrier, {x, many}, {x}, true, true},
      {Op::kStart, {x, token}, {integers, token}, false, false},
      {Op::kWait, {integers, x}, {x}, false, false},
      {Op::kPhilox, {integers, integers, integers, integers}, {{kFloat}}, false, true},
  };
  return all;
}

// One operator on one provider. Tokens on a GPU are values that nobody writes or reads: only their
// order is meant. So neither they nor the handle between Start and Wait, which stand for themselves by
// their address, ever move between GPU and host.
struct CustomOp : ort::CustomOp {
  const Signature* signature;
  RankContext* rank;
  bool on_device;
};

const CustomOp& self(const ort::CustomOp* op) { return *static_cast<const CustomOp*>(op); }

ort::Status* failure(int code, const std::string& message) {
  return api().create_status(code, message.c_str());
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
    std::unique_ptr<Kernel> made =
        custom.on_device ? make_device_kernel(custom.signature->op, *custom.rank, attributes)
                         : make_host_kernel(custom.signature->op, *custom.rank, attributes);
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

CustomOp make_op(const Signature& signature, RankContext* rank, bool on_device) {
  CustomOp op{};
  op.version = ort::kVersion;
  op.signature = &signature;
  op.rank = rank;
  op.on_device = on_device;
  op.name = [](const ort::CustomOp* o) { return op_name(self(o).signature->op); };
  op.execution_provider = [](const ort::CustomOp* o) -> const char* {
    return self(o).on_device ? ort::kCudaProvider : nullptr;
  };
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
    const Signature& of = *self(o).signature;
    const bool numbers = port(of.inputs, i).type == kInt64 && of.op != Op::kWait;
    return numbers ? ort::kMemoryCpuInput : ort::kMemoryDefault;
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
  // A rank with a GPU has both kernels: onnxruntime leaves arithmetic of shapes to the CPU.
  const bool has_device = rank != nullptr && rank->device() != nullptr;
  for (const Signature& signature : signatures()) {
    for (bool on_device : {false, true}) {
      if (on_device && !has_device && !signature.alone) continue;
      CustomOp& op = kept_ops().emplace_back(make_op(signature, rank, on_device));
      op.may_inplace = signature.inplace ? inplace_first : inplace_none;
      op.release_may_inplace = release_pairs;
      op.alias_map = inplace_none;
      op.release_alias_map = release_pairs;
      if (ort::Status* status = api().domain_add(domain, &op)) return status;
    }
  }
  if (ort::Status* status = add_kernels(domain, has_device)) return status;
  return api().add_domain(options, domain);
}

}  // namespace onnxpar
