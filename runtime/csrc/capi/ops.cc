#include "capi/ops.h"

#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>

#include "collective/dialects.h"
#include "collective/operators.h"
#include "kernels/operators.h"

namespace onnxpar {
namespace {

// One operator on one provider.
struct CustomOp : ort::CustomOp {
  const Operator* of;
  RankContext* rank;
  bool on_device;
};

const CustomOp& self(const ort::CustomOp* op) { return *static_cast<const CustomOp*>(op); }
const Operator& spec(const ort::CustomOp* op) { return *self(op).of; }

ort::Status* failure(int code, const std::string& message) {
  return api().create_status(code, message.c_str());
}

ort::Status* create_kernel(const ort::CustomOp* op, const void*, const ort::KernelInfo* info,
                           void** kernel) {
  const CustomOp& custom = self(op);
  const KernelAttributes attributes(info);
  std::string where = custom.of->name;
  try {
    where += " '" + attributes.node() + "'";
    if (custom.of->of_rank) {
      if (custom.rank == nullptr) {
        throw std::invalid_argument(
            "no rank was set when the session's options were registered: call onnxpar_bind before, "
            "or set ONNXPAR_WORLD=mpi");
      }
      where = "rank " + std::to_string(custom.rank->rank()) + ": " + where;
    }
    const Node node{attributes, where, custom.rank, custom.on_device, attributes.outputs()};
    *kernel = custom.of->make(node).release();
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
    k.failed();
    return failure(ort::kInvalidArgument, k.describe() + ": " + e.what());
  } catch (const std::exception& e) {
    k.failed();
    return failure(ort::kFail, k.failure(e.what()));
  }
}

ort::Status* infer_shape(const ort::CustomOp* op, ort::ShapeContext* context) {
  const std::vector<OutPort>& outputs = spec(op).outputs;
  try {
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].infer) continue;
      Inferred found = outputs[i].infer({context, self(op).rank});
      if (!found) continue;
      if (outputs[i].type != kAny) found->type = outputs[i].type;
      try {
        infer_output(context, i, *found);
      } catch (const std::runtime_error&) {
        // The number of outputs is not available here; an output that may be left out is optional.
        if (outputs[i].characteristic != ort::kOptional) throw;
      }
    }
    return nullptr;
  } catch (const std::exception& e) {
    return failure(ort::kInvalidArgument, std::string(spec(op).name) + ": " + e.what());
  }
}

// onnxruntime uses indices beyond the last port for the values of a variadic port.
template <class Port>
const Port& port(const std::vector<Port>& ports, size_t index) {
  return ports[index < ports.size() ? index : ports.size() - 1];
}

void release_pairs(int* inputs, int* outputs) {
  delete[] inputs;
  delete[] outputs;
}

CustomOp make_op(const Operator& of, RankContext* rank, bool on_device) {
  CustomOp op{};
  op.version = ort::kVersion;
  op.of = &of;
  op.rank = rank;
  op.on_device = on_device;
  op.name = [](const ort::CustomOp* o) { return spec(o).name; };
  op.execution_provider = [](const ort::CustomOp* o) -> const char* {
    return self(o).on_device ? ort::kCudaProvider : nullptr;
  };
  op.input_type = [](const ort::CustomOp* o, size_t i) { return port(spec(o).inputs, i).type; };
  op.input_type_count = [](const ort::CustomOp* o) { return spec(o).inputs.size(); };
  op.output_type = [](const ort::CustomOp* o, size_t i) { return port(spec(o).outputs, i).type; };
  op.output_type_count = [](const ort::CustomOp* o) { return spec(o).outputs.size(); };
  op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.input_characteristic = [](const ort::CustomOp* o, size_t i) {
    return port(spec(o).inputs, i).characteristic;
  };
  op.output_characteristic = [](const ort::CustomOp* o, size_t i) {
    return port(spec(o).outputs, i).characteristic;
  };
  op.input_memory = [](const ort::CustomOp* o, size_t i) {
    return port(spec(o).inputs, i).on_host ? ort::kMemoryCpuInput : ort::kMemoryDefault;
  };
  // An operator has at least one input.
  op.variadic_input_min = [](const ort::CustomOp* o) { return spec(o).inputs.size() == 1 ? 1 : 0; };
  op.variadic_input_homogeneous = [](const ort::CustomOp*) { return 0; };
  op.variadic_output_min = [](const ort::CustomOp*) { return 1; };
  op.variadic_output_homogeneous = [](const ort::CustomOp*) { return 0; };
  op.create_kernel_v2 = create_kernel;
  op.compute_v2 = compute;
  op.infer_shape = infer_shape;
  op.start_version = [](const ort::CustomOp*) { return 1; };
  op.end_version = [](const ort::CustomOp*) { return 1; };
  op.may_inplace = of.in_place;
  op.release_may_inplace = release_pairs;
  op.alias_map = of.alias;
  op.release_alias_map = release_pairs;
  return op;
}

// Operators must outlive every session made with them, and it is not known when sessions end. So they
// are kept: one for each rank, or one for all ranks if the operator does not act as a rank.
const CustomOp& kept_op(const Operator& of, RankContext* rank, bool on_device) {
  static auto* mutex = new std::mutex();
  static auto* kept = new std::map<std::tuple<const Operator*, RankContext*, bool>, CustomOp>();
  std::lock_guard lock(*mutex);
  const auto key = std::make_tuple(&of, of.of_rank ? rank : nullptr, on_device);
  const auto found = kept->find(key);
  if (found != kept->end()) return found->second;
  return kept->emplace(key, make_op(of, std::get<1>(key), on_device)).first->second;
}

// The names of operators in the entry `onnxpar.operators` of the options, separated by commas. Null
// without this entry: all operators are wanted. onnxruntime builds the schemas of all registered
// operators for each session, which takes longer than the rest of a session of a small graph.
std::unique_ptr<std::set<std::string>> wanted_operators(const ort::SessionOptions* options) {
  constexpr const char* kEntry = "onnxpar.operators";
  int found = 0;
  check(api().has_entry(options, kEntry, &found));
  if (!found) return nullptr;
  size_t size = 0;
  check(api().entry(options, kEntry, nullptr, &size));
  std::string names(size, '\0');
  check(api().entry(options, kEntry, names.data(), &size));
  names.resize(size - 1);  // without the 0 at the end
  auto wanted = std::make_unique<std::set<std::string>>();
  std::istringstream rest(names);
  for (std::string name; std::getline(rest, name, ',');) wanted->insert(name);
  return wanted;
}

// `wanted` are the names of the operators to add, null for all.
ort::Status* add_domain(ort::SessionOptions* options, const char* name,
                        const std::vector<const std::vector<Operator>*>& all, RankContext* rank,
                        const std::set<std::string>* wanted) {
  ort::CustomOpDomain* domain = nullptr;
  if (ort::Status* status = api().create_domain(name, &domain)) return status;
  // A rank with a GPU has both kernels: onnxruntime runs arithmetic of shapes on the CPU.
  const bool has_gpu = rank != nullptr && rank->device() != nullptr;
  for (const auto* operators : all) {
    for (const Operator& of : *operators) {
      if (of.needs_no_gpu && has_gpu) continue;
      if (wanted != nullptr && wanted->count(of.name) == 0) continue;
      for (bool on_device : {false, true}) {
        if (on_device ? of.needs_no_gpu || (of.needs_gpu && !has_gpu) : !of.on_host) continue;
        if (ort::Status* status = api().domain_add(domain, &kept_op(of, rank, on_device))) {
          return status;
        }
      }
    }
  }
  return api().add_domain(options, domain);
}

}  // namespace

ort::Status* register_ops(ort::SessionOptions* options, RankContext* rank,
                          const std::string& dialect) {
  const auto wanted = wanted_operators(options);
  ort::Status* status = add_domain(
      options, "onnxpar", {&collective_operators(), &fused_operators()}, rank, wanted.get());
  if (status != nullptr || dialect.empty()) return status;
  if (dialect == "tensorrt") return add_domain(options, "", {&tensorrt_operators()}, rank, nullptr);
  return add_domain(options, "com.microsoft", {&microsoft_operators()}, rank, nullptr);
}

}  // namespace onnxpar
