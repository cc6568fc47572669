#include "collective/dialects.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <stdexcept>

#include "collective/op_kernel.h"

namespace onnxpar {
namespace {

constexpr const char* kDistCollective = "DistCollective";

// What a node of another runtime says, in the words of the domain onnxpar.
struct Words : Attributes {
  std::optional<int64_t> integer(const char* name) const override {
    const auto found = integers_.find(name);
    return found == integers_.end() ? std::nullopt : std::optional<int64_t>(found->second);
  }
  std::optional<std::string> text(const char* name) const override {
    if (std::string(name) != "reduction" || reduction.empty()) return std::nullopt;
    return reduction;
  }
  std::optional<std::vector<int64_t>> integers(const char* name) const override {
    if (std::string(name) != "group") return std::nullopt;
    return group;
  }
  std::optional<double> real(const char*) const override { return std::nullopt; }

  std::string reduction;
  std::vector<int64_t> group;
  std::map<std::string, int64_t> integers_;
};

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

void expect(const char* attribute, int64_t got, int64_t expected) {
  if (got == expected) return;
  throw std::invalid_argument(std::string(attribute) + " is " + std::to_string(got) +
                              ", expected the group's " + std::to_string(expected) + " ranks");
}

// https://docs.nvidia.com/deeplearning/tensorrt/11.0.0/_static/operators/DistCollective.html: all
// operations are along dim 0.
Collective tensorrt_collective(const std::string& node, const Attributes& attributes, int world) {
  const std::map<std::string, Op> operations = {{"all_reduce", Op::kAllReduce},
                                                {"all_gather", Op::kAllGather},
                                                {"reduce_scatter", Op::kReduceScatter},
                                                {"all_to_all", Op::kAllToAll}};
  const std::string operation = lower(attributes.text("collective_operation").value_or(""));
  const auto found = operations.find(operation);
  if (found == operations.end()) {
    throw std::invalid_argument("collective_operation is '" + operation +
                                "', expected all_reduce, all_gather, reduce_scatter or all_to_all");
  }
  const bool reduces = found->second == Op::kAllReduce || found->second == Op::kReduceScatter;
  Words words;
  words.reduction = lower(attributes.text("reduce_op").value_or("none"));
  if (reduces == (words.reduction == "none")) {
    throw std::invalid_argument("reduce_op is '" + words.reduction + "' for " + operation);
  }
  words.group = attributes.integers("groups").value_or(Shape{});
  expect("group_size", attributes.integer("group_size").value_or(0),
         static_cast<int64_t>(words.group.size()));
  words.integers_ = {{"axis", 0}, {"split_axis", 0}, {"concat_axis", 0}};
  Collective c = parse_collective(found->second, node, words, world);
  expect("nb_rank", attributes.integer("nb_rank").value_or(1), c.size());
  c.where = std::string(kDistCollective) + " '" + node + "'";
  return c;
}

// onnxruntime's contrib_ops/cuda/collective/nccl_kernels.cc: one communicator of all ranks; AllToAll
// exchanges equal blocks of dim 0.
Collective microsoft_collective(Op op, const std::string& node, const Attributes& attributes,
                                int world) {
  Words words;
  const int64_t axis = attributes.integer("axis").value_or(1);
  words.integers_ = {{"axis", axis}, {"split_axis", 0}, {"concat_axis", 0}};
  Collective c = parse_collective(op, node, words, world);
  if (op != Op::kAllReduce) {
    expect("group_size", attributes.integer("group_size").value_or(1), world);
  }
  c.where = std::string("com.microsoft.") + c.where;
  return c;
}

using Parse = std::function<Collective(const std::string&, const Attributes&, int world)>;

Operator foreign(const char* name, const Parse& parse) {
  const auto infer = [parse](const ShapeQuery& query) -> Inferred {
    SymbolicTensor x = query.input(0);
    if (x.shape.empty() || query.rank == nullptr) return std::nullopt;
    const Collective c =
        parse("", ShapeAttributes(query.context), query.rank->size());
    x.shape = output_shape(c, x.shape);
    // A dim whose size changes may have had a name.
    if (c.op != Op::kAllReduce) std::fill(x.names.begin(), x.names.end(), "");
    return x;
  };
  const auto make = [parse](const Node& node) {
    Collective c = parse(node.attributes.node(), node.attributes, node.rank->size());
    return node.on_device ? make_device_collective(node, std::move(c))
                          : make_host_collective(node, std::move(c));
  };
  return {name, {InPort{}}, {{kAny, ort::kRequired, infer}}, never_in_place, make, true, true, true};
}

Operator microsoft(Op op) {
  return foreign(op_name(op), [op](const std::string& node, const Attributes& attributes, int world) {
    return microsoft_collective(op, node, attributes, world);
  });
}

}  // namespace

const std::vector<Operator>& tensorrt_operators() {
  static const std::vector<Operator> all = {foreign(kDistCollective, tensorrt_collective)};
  return all;
}

const std::vector<Operator>& microsoft_operators() {
  static const std::vector<Operator> all = {microsoft(Op::kAllReduce), microsoft(Op::kAllGather),
                                            microsoft(Op::kAllToAll)};
  return all;
}

}  // namespace onnxpar
