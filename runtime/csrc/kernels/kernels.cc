#include "kernels/kernels.h"

#include <deque>

#include "abi/cuda_compiler.h"
#include "abi/cuda_driver.h"
#include "kernels/io.h"
#include "kernels/pool.h"

namespace onnxpar {
namespace {

// One operator on one provider.
struct TrainingOp : ort::CustomOp {
  const KernelSpec* spec;
  bool on_device;
};

const KernelSpec& spec(const ort::CustomOp* op) {
  return *static_cast<const TrainingOp*>(op)->spec;
}
bool on_device(const ort::CustomOp* op) { return static_cast<const TrainingOp*>(op)->on_device; }

struct TrainingKernel {
  std::string where;
  Compute compute;
};

ort::Status* failure(int code, const std::string& message) {
  return api().create_status(code, message.c_str());
}

ort::Status* create_kernel(const ort::CustomOp* op, const void*, const ort::KernelInfo* info,
                           void** kernel) {
  const KernelAttributes attributes(info);
  std::string where = spec(op).name;
  try {
    where += " '" + attributes.node() + "'";
    const size_t outputs = attributes.outputs();
    if (!on_device(op)) {
      *kernel = new TrainingKernel{where, spec(op).make(attributes, outputs)};
      return nullptr;
    }
    // What is missing is told before anything runs.
    cuda::driver();
    cuda::load_compiler();
    *kernel = new TrainingKernel{where, spec(op).make_on_device(attributes, outputs)};
    return nullptr;
  } catch (const std::exception& e) {
    return failure(ort::kInvalidArgument, where + ": " + e.what());
  }
}

ort::Status* compute(void* kernel, ort::KernelContext* context) {
  const TrainingKernel& k = *static_cast<TrainingKernel*>(kernel);
  try {
    k.compute(Io(context));
    return nullptr;
  } catch (const std::invalid_argument& e) {
    return failure(ort::kInvalidArgument, k.where + ": " + e.what());
  } catch (const std::exception& e) {
    return failure(ort::kFail, k.where + ": " + e.what());
  }
}

// onnxruntime reports a shape it does not know as no dims at all, like a scalar: then nothing is
// said of the outputs.
ort::Status* infer_shape(const ort::CustomOp* op, ort::ShapeContext* context) {
  const KernelSpec& s = spec(op);
  try {
    for (size_t i = 0; i < s.like.size(); ++i) {
      SymbolicTensor like = inferred_input(context, s.like[i].input);
      if (s.like[i].wide && like.type != kDouble) like.type = static_cast<int>(DType::kFloat32);
      bool scalar = s.like[i].shape == Like::Shape::kScalar;
      if (s.like[i].shape == Like::Shape::kLoss) {
        // One for each label, which are the second input, or all of them in one.
        const ShapeAttributes attributes(context);
        scalar = attributes.text("reduction").value_or("mean") != "none";
        const SymbolicTensor labels = inferred_input(context, 1);
        like.shape = labels.shape;
        like.names = labels.names;
      }
      if (s.like[i].shape == Like::Shape::kPooled && !like.shape.empty()) {
        const Shape pooled = PoolWindows(ShapeAttributes(context)).results(like.shape);
        for (size_t d = 2; d < pooled.size(); ++d) like.names[d].clear();
        like.shape = pooled;
      }
      if (s.like[i].type != kAny) like.type = s.like[i].type;
      if (scalar) {
        like.shape.clear();
        like.names.clear();
      } else if (like.shape.empty()) {
        continue;
      }
      try {
        infer_output(context, i, like);
      } catch (const std::runtime_error&) {
        // The count of outputs cannot be asked for; one that may be left out is.
        if (!s.optional_outputs || i == 0) throw;
      }
    }
    return nullptr;
  } catch (const std::exception& e) {
    return failure(ort::kInvalidArgument, std::string(s.name) + ": " + e.what());
  }
}

void release_pairs(int* inputs, int* outputs) {
  delete[] inputs;
  delete[] outputs;
}

TrainingOp make_op(const KernelSpec& of, bool device) {
  TrainingOp op{};
  op.on_device = device;
  op.version = ort::kVersion;
  op.spec = &of;
  op.name = [](const ort::CustomOp* o) { return spec(o).name; };
  op.execution_provider = [](const ort::CustomOp* o) -> const char* {
    return on_device(o) ? ort::kCudaProvider : nullptr;
  };
  // onnxruntime asks beyond the last for what a variadic input stands for.
  op.input_type = [](const ort::CustomOp* o, size_t i) {
    const std::vector<int>& inputs = spec(o).inputs;
    return inputs[i < inputs.size() ? i : inputs.size() - 1];
  };
  op.output_type = [](const ort::CustomOp* o, size_t i) { return spec(o).like[i].type; };
  op.input_type_count = [](const ort::CustomOp* o) { return spec(o).inputs.size(); };
  op.output_type_count = [](const ort::CustomOp* o) { return spec(o).like.size(); };
  op.destroy = [](void* kernel) { delete static_cast<TrainingKernel*>(kernel); };
  op.input_characteristic = [](const ort::CustomOp* o, size_t i) {
    const KernelSpec& s = spec(o);
    if (s.variadic && i + 1 >= s.inputs.size()) return ort::kVariadic;
    return i + s.optional < s.inputs.size() ? ort::kRequired : ort::kOptional;
  };
  op.output_characteristic = [](const ort::CustomOp* o, size_t i) {
    return spec(o).optional_outputs && i > 0 ? ort::kOptional : ort::kRequired;
  };
  op.input_memory = [](const ort::CustomOp*, size_t) { return ort::kMemoryDefault; };
  op.variadic_input_min = [](const ort::CustomOp*) { return 1; };
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
  op.alias_map = never_in_place;
  op.release_alias_map = release_pairs;
  return op;
}

// One set serves all sessions: the operators keep nothing, and must outlive every session.
std::deque<TrainingOp>& all_ops() {
  static auto* ops = [] {
    auto* made = new std::deque<TrainingOp>();
    for (const auto* specs : {&pointwise_kernels(), &row_kernels(), &loss_kernels(),
                              &gather_kernels(), &update_kernels(), &standard_kernels()}) {
      for (const KernelSpec& one : *specs) {
        if (one.make != nullptr) made->push_back(make_op(one, false));
        made->push_back(make_op(one, true));
      }
    }
    return made;
  }();
  return *ops;
}

}  // namespace

ort::Status* add_kernels(ort::CustomOpDomain* domain, bool has_device) {
  for (TrainingOp& op : all_ops()) {
    if (op.spec->make == nullptr && !has_device) continue;
    if (ort::Status* status = api().domain_add(domain, &op)) return status;
  }
  return nullptr;
}

}  // namespace onnxpar
