#include "collective/operators.h"

#include "collective/op_kernel.h"

namespace onnxpar {
namespace {

Inferred collective_shape(Op op, const ShapeQuery& query) {
  const ShapeAttributes attributes(query.context);
  SymbolicTensor x = query.input(0);
  if (x.shape.empty() || query.rank == nullptr) return std::nullopt;
  const Op which =
      op == Op::kStart ? collective_from_name(attributes.text("op").value_or("")) : op;
  const Collective c = parse_collective(which, "", attributes, query.rank->size());
  const Shape shape = output_shape(c, x.shape);
  const auto rank = static_cast<int64_t>(shape.size());
  const auto clear = [&](int64_t axis) {
    x.names[static_cast<size_t>(axis < 0 ? axis + rank : axis)].clear();
  };
  if (which == Op::kAllGather || which == Op::kReduceScatter || which == Op::kAllToAll) {
    clear(c.axis);
  }
  if (which == Op::kAllToAll) clear(c.concat_axis);
  x.shape = shape;
  return x;
}

Inferred one_element(const ShapeQuery&) { return SymbolicTensor{kAny, {1}, {""}}; }

Inferred first_input(const ShapeQuery& query) {
  SymbolicTensor x = query.input(0);
  if (x.shape.empty()) return std::nullopt;
  return x;
}

Operator collective(Op op, std::vector<InPort> inputs, std::vector<OutPort> outputs,
                    InPlace pairs = never_in_place, InPlace alias = never_in_place) {
  if ((op <= Op::kPermute || op == Op::kStart) && !outputs[0].infer) {
    outputs[0].infer = [op](const ShapeQuery& query) { return collective_shape(op, query); };
  }
  const auto make = [op](const Node& node) {
    return node.on_device ? make_device_kernel(op, node) : make_host_kernel(op, node);
  };
  // A barrier's kernel does not need the rank's GPU.
  const bool needs_gpu = op != Op::kBarrier;
  return {op_name(op), std::move(inputs), std::move(outputs), pairs, make, true, true, needs_gpu,
          alias};
}

}  // namespace

// Tokens on a GPU are never written or read; they only order nodes. So they are never copied between
// GPU and host.
const std::vector<Operator>& collective_operators() {
  const InPort x;
  const InPort token{kToken, ort::kOptional};
  const OutPort y;
  const OutPort next{kToken, ort::kOptional};
  static const std::vector<Operator> all = {
      collective(Op::kAllReduce, {x, token}, {y, next}, in_place<0>),
      collective(Op::kAllGather, {x, token}, {y, next}),
      collective(Op::kReduceScatter, {x, token}, {y, next}),
      collective(Op::kAllToAll, {x, token}, {y, next}),
      collective(Op::kBroadcast, {x, token}, {y, next}, in_place<0>),
      collective(Op::kPermute, {x, token}, {y, next}),
      collective(Op::kSend, {x, token}, {{kToken, ort::kRequired, one_element}}),
      collective(Op::kRecv, {{kInt64, ort::kRequired, true}, token}, {y, next}),
      collective(Op::kBarrier, {x, {kAny, ort::kVariadic}},
                 {{kAny, ort::kRequired, first_input}}, in_place<0>),
      collective(Op::kStart, {x, token}, {y, next}),
      collective(Op::kWait, {x, x, token}, {{kAny, ort::kOptional, first_input}, next},
                 in_place<0>),
      collective(Op::kBucket, {token, {kAny, ort::kVariadic}},
                 {next, {kAny, ort::kVariadic}}),
      collective(Op::kStartAhead,
                 {{kToken}, {kInt64, ort::kRequired, true}, {kAny, ort::kVariadic}},
                 {{kToken, ort::kRequired, one_element}}),
      collective(Op::kFinishLater,
                 {{kToken}, {kInt64, ort::kRequired, true}, {kAny, ort::kVariadic}},
                 {{kToken, ort::kRequired, one_element}, {kAny, ort::kVariadic}}),
      collective(Op::kFinish, {x, {kAny, ort::kOptional}}, {{kAny, ort::kRequired, first_input}},
                 never_in_place, in_place<0>),
  };
  return all;
}

}  // namespace onnxpar
