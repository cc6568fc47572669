// The description of an operator of the domain `onnxpar`, for the kernels of both providers.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "abi/ort_io.h"

namespace onnxpar {

class RankContext;

inline constexpr int kAny = 0;
inline constexpr int kFloat = static_cast<int>(DType::kFloat32);
inline constexpr int kDouble = static_cast<int>(DType::kFloat64);
inline constexpr int kInt64 = static_cast<int>(DType::kInt64);
inline constexpr int kBool = static_cast<int>(DType::kBool);
inline constexpr int kToken = static_cast<int>(DType::kUint8);

struct InPort {
  int type = kAny;
  int characteristic = ort::kRequired;
  bool on_host = false;  // is in host memory for kernels on a GPU too
};

// The inputs of shape inference. `rank` is null for sessions without one.
struct ShapeQuery {
  const ort::ShapeContext* context;
  RankContext* rank;
  SymbolicTensor input(size_t index) const { return inferred_input(context, index); }
};
// Nothing if it is unknown. onnxruntime reports an input with an unknown shape like a scalar, so
// nothing is inferred from scalars either.
using Inferred = std::optional<SymbolicTensor>;

struct OutPort {
  int type = kAny;
  int characteristic = ort::kRequired;
  // Null if nothing is inferred. Throws std::invalid_argument.
  std::function<Inferred(const ShapeQuery&)> infer = nullptr;
};

// The kernel of one node. Calls throw std::invalid_argument for wrong inputs.
class Kernel {
 public:
  // `where` is how errors name the node.
  explicit Kernel(std::string where) : where_(std::move(where)) {}
  virtual ~Kernel() = default;
  virtual void compute(const Io& io) = 0;
  virtual std::string describe() const { return where_; }
  // Comes after a call that failed, before the memory of the run's tensors is freed.
  virtual void failed() {}
  // The message if a call failed for another reason than its inputs.
  virtual std::string failure(const std::string& what) const { return describe() + ": " + what; }

 protected:
  const std::string where_;
};

// A node that a kernel is made for.
struct Node {
  const KernelAttributes& attributes;
  std::string where;  // "rank 0: Philox 'node'", with the rank if the operator acts as a rank
  RankContext* rank;  // null if the operator does not act as a rank
  bool on_device;     // its tensors are on a GPU
  size_t outputs;
};

// Pairs of input and output that may share memory: output i is that of the i-th number.
using InPlace = size_t (*)(int** inputs, int** outputs);
template <int... kInputs>
size_t in_place(int** inputs, int** outputs) {
  constexpr size_t kCount = sizeof...(kInputs);
  *inputs = new int[kCount]{kInputs...};
  *outputs = new int[kCount];
  for (size_t i = 0; i < kCount; ++i) (*outputs)[i] = static_cast<int>(i);
  return kCount;
}
inline size_t never_in_place(int** inputs, int** outputs) {
  *inputs = nullptr;
  *outputs = nullptr;
  return 0;
}

struct Operator {
  const char* name;
  // If onnxruntime does not know the shape of the input whose type output i has, it gives the output
  // the type of the last input of type kAny. So that input must have the same type, because unknown
  // shapes look like scalars.
  std::vector<InPort> inputs;
  std::vector<OutPort> outputs;
  InPlace in_place = never_in_place;
  // Throws std::invalid_argument if the attributes are wrong.
  std::function<std::unique_ptr<Kernel>(const Node&)> make;
  bool of_rank = false;    // its kernels act as a rank
  bool on_host = true;     // false if the CPU provider, or a function in graphs, has it
  bool needs_gpu = false;  // registered for the CUDA provider only if the rank has a GPU
  // Pairs that share memory always, also if the input is one of the graph.
  InPlace alias = never_in_place;
  bool needs_no_gpu = false;  // registered only if the rank has no GPU; else a function has it
};

}  // namespace onnxpar
