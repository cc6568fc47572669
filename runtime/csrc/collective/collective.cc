#include "collective/collective.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <stdexcept>

#include "collective/call_log.h"

namespace onnxpar {
namespace {

constexpr const char* kNames[kOps] = {"AllReduce", "AllGather", "ReduceScatter", "AllToAll",
                                      "Broadcast", "Permute",   "Send",          "Recv",
                                      "Barrier",   "Start",     "Wait",          "StartAhead",
                                      "FinishLater", "Finish",  "Bucket",        "Philox"};

// The size up to which a buffer stays allocated between calls.
constexpr size_t kKeptScratch = size_t{64} << 20;

int64_t normal_axis(int64_t axis, size_t rank, const char* name) {
  const int64_t r = static_cast<int64_t>(rank);
  if (axis < -r || axis >= r) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(axis) +
                                ", expected one of [-" + std::to_string(r) + ", " +
                                std::to_string(r) + ") for an input with " + std::to_string(r) +
                                " dims");
  }
  return axis < 0 ? axis + r : axis;
}

int index_in(const std::vector<int>& group, int64_t rank, const char* what) {
  for (size_t i = 0; i < group.size(); ++i) {
    if (group[i] == rank) return static_cast<int>(i);
  }
  throw std::invalid_argument(std::string(what) + " " + std::to_string(rank) +
                              " is not in the group " + to_text(group));
}

std::vector<Pair> parse_pairs(const std::vector<int64_t>& flat, const std::vector<int>& group) {
  if (flat.size() % 2 != 0) {
    throw std::invalid_argument("pairs: expected source, destination, …, got " +
                                std::to_string(flat.size()) + " numbers");
  }
  std::vector<Pair> pairs;
  std::set<int> sources;
  std::set<int> destinations;
  for (size_t i = 0; i < flat.size(); i += 2) {
    const Pair pair{index_in(group, flat[i], "pairs: source"),
                    index_in(group, flat[i + 1], "pairs: destination")};
    if (!sources.insert(pair.source).second) {
      throw std::invalid_argument("pairs: rank " + std::to_string(flat[i]) + " sends twice");
    }
    if (!destinations.insert(pair.destination).second) {
      throw std::invalid_argument("pairs: rank " + std::to_string(flat[i + 1]) +
                                  " receives twice");
    }
    pairs.push_back(pair);
  }
  return pairs;
}

struct CollectiveCall : Call {
  CollectiveCall(const Collective& c, DType t, const List<Operand>& all)
      : Call(c.where, hash(static_cast<uint64_t>(t), hash(c.place, c.signature))),
        collective(c),
        type(t),
        operands(all) {
    for (const Operand& operand : operands) {
      signature = hash(operand.input.size(), signature);
      for (int64_t dim : operand.input) signature = hash(static_cast<uint64_t>(dim), signature);
    }
  }
  std::string detail() const override {
    const std::string head = std::string(op_name(collective.op)) + " " + dtype_name(type) + " ";
    if (operands.size() == 1) {
      return head + to_text(operands[0].input) + " " + collective.attributes;
    }
    std::string text = head + collective.attributes + " of " + std::to_string(operands.size()) +
                       " tensors";
    for (size_t i = 0; i < operands.size(); ++i) {
      text += kNextTensor;
      if (i < collective.values.size()) text += collective.values[i] + " ";
      text += to_text(operands[i].input);
    }
    return text;
  }
  const Collective& collective;
  const DType type;
  const List<Operand>& operands;
};

// The elements of the dims before an axis.
size_t outer_dims(int64_t axis, const char* name, const Shape& shape) {
  return product(shape, 0, static_cast<size_t>(normal_axis(axis, shape.size(), name)));
}

void all_reduce(Transport& transport, Group& group, const CollectiveCall& call, Stream stream) {
  std::vector<Block> blocks;
  for (const Operand& operand : call.operands) {
    blocks.emplace_back(operand.in, operand.out, product(operand.input));
  }
  transport.all_reduce(group, call, blocks, call.type, call.collective.reduction, stream);
}

void all_gather(Transport& transport, Group& group, const CollectiveCall& call, Memory& memory,
                Stream stream) {
  const size_t g = group.ranks.size();
  // The results whose blocks of the members are not one after the other come there by a buffer.
  size_t buffered = 0;
  std::vector<size_t> outers;
  std::vector<Block> blocks;
  for (const Operand& operand : call.operands) {
    const Shape& shape = operand.input;
    const size_t bytes = bytes_of(shape, call.type);
    outers.push_back(bytes == 0 ? 1 : outer_dims(call.collective.axis, "axis", shape));
    blocks.emplace_back(operand.in, operand.out, bytes);
    if (outers.back() > 1) buffered += bytes * g;
  }
  std::byte* next = buffered == 0 ? nullptr : memory.scratch(0, buffered, stream);
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (outers[i] == 1) continue;
    blocks[i].out = next;
    next += blocks[i].count * g;
  }
  transport.all_gather(group, call, blocks, stream);
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (outers[i] == 1) continue;
    memory.interleave(call.operands[i].out, blocks[i].out, g, outers[i],
                      blocks[i].count / outers[i], stream);
  }
}

void reduce_scatter(Transport& transport, Group& group, const CollectiveCall& call, Memory& memory,
                    Stream stream) {
  const size_t g = group.ranks.size();
  const size_t item = dtype_size(call.type);
  size_t buffered = 0;
  std::vector<size_t> outers;
  std::vector<Block> blocks;
  for (const Operand& operand : call.operands) {
    const Shape& shape = operand.input;
    const size_t count = product(shape);
    outers.push_back(count == 0 ? 1 : outer_dims(call.collective.axis, "axis", shape));
    blocks.emplace_back(operand.in, operand.out, count / g);
    if (outers.back() > 1) buffered += count * item;
  }
  std::byte* next = buffered == 0 ? nullptr : memory.scratch(0, buffered, stream);
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (outers[i] == 1) continue;
    memory.interleave(next, blocks[i].in, outers[i], g, blocks[i].count * item / outers[i],
                      stream);
    blocks[i].in = next;
    next += blocks[i].count * g * item;
  }
  transport.reduce_scatter(group, call, blocks, call.type, call.collective.reduction, stream);
}

void all_to_all(Transport& transport, Group& group, const CollectiveCall& call, size_t bytes,
                Memory& memory, Stream stream) {
  const Collective& c = call.collective;
  const auto& [in, out, input] = call.operands[0];
  const size_t g = group.ranks.size();
  const size_t outer = outer_dims(c.axis, "split_axis", input);
  Shape block = input;
  block[static_cast<size_t>(normal_axis(c.axis, input.size(), "split_axis"))] /=
      static_cast<int64_t>(g);
  const size_t outer_out = outer_dims(c.concat_axis, "concat_axis", block);
  const size_t each = bytes / g;
  const void* source = in;
  if (outer > 1 && bytes != 0) {
    std::byte* blocks = memory.scratch(0, bytes, stream);
    memory.interleave(blocks, in, outer, g, each / outer, stream);
    source = blocks;
  }
  if (outer_out <= 1 || bytes == 0) {
    transport.all_to_all(group, call, source, out, each, stream);
    return;
  }
  std::byte* received = memory.scratch(1, bytes, stream);
  transport.all_to_all(group, call, source, received, each, stream);
  memory.interleave(out, received, g, outer_out, each / outer_out, stream);
}

}  // namespace

const char* op_name(Op op) { return kNames[static_cast<int>(op)]; }

Op collective_from_name(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(Op::kPermute); ++i) {
    if (name == kNames[i]) return static_cast<Op>(i);
  }
  throw std::invalid_argument("op is '" + name + "', expected the name of a collective");
}

Collective parse_collective(Op op, const std::string& node, const Attributes& attributes,
                            int world_size) {
  Collective c;
  c.op = op;
  c.where = std::string(op_name(op)) + " '" + node + "'";
  const std::optional<std::vector<int64_t>> group = attributes.integers("group");
  if (group && !group->empty()) {
    std::set<int64_t> seen;
    for (int64_t rank : *group) {
      if (rank < 0 || rank >= world_size) {
        throw std::invalid_argument("group " + to_text(*group) + ": rank " +
                                    std::to_string(rank) + " is not in a world of " +
                                    std::to_string(world_size) + " ranks" +
                                    (world_size > 1 ? "" : ": start a process for each, as by mpirun"));
      }
      if (!seen.insert(rank).second) {
        throw std::invalid_argument("group " + to_text(*group) + ": rank " +
                                    std::to_string(rank) + " occurs twice");
      }
      c.group.push_back(static_cast<int>(rank));
    }
  } else {
    for (int rank = 0; rank < world_size; ++rank) c.group.push_back(rank);
  }
  switch (op) {
    case Op::kAllReduce:
      c.reduction = reduction_from_name(attributes.text("reduction").value_or("sum"));
      c.attributes = std::string("reduction=") + reduction_name(c.reduction);
      break;
    case Op::kAllGather:
      c.axis = attributes.need_integer("axis");
      c.attributes = "axis=" + std::to_string(c.axis);
      break;
    case Op::kReduceScatter:
      c.axis = attributes.need_integer("axis");
      c.reduction = reduction_from_name(attributes.text("reduction").value_or("sum"));
      c.attributes = "axis=" + std::to_string(c.axis) + " reduction=" +
                     reduction_name(c.reduction);
      break;
    case Op::kAllToAll:
      c.axis = attributes.need_integer("split_axis");
      c.concat_axis = attributes.need_integer("concat_axis");
      c.attributes = "split_axis=" + std::to_string(c.axis) + " concat_axis=" +
                     std::to_string(c.concat_axis);
      break;
    case Op::kBroadcast: {
      const int64_t root = attributes.need_integer("root");
      c.root = index_in(c.group, root, "root");
      c.attributes = "root=" + std::to_string(root);
      break;
    }
    case Op::kPermute: {
      const std::vector<int64_t> flat = attributes.integers("pairs").value_or(Shape{});
      c.pairs = parse_pairs(flat, c.group);
      c.attributes = "pairs=" + to_text(flat);
      break;
    }
    default:
      throw std::invalid_argument(std::string(op_name(op)) + " is not a collective");
  }
  c.signature = hash(c.attributes, hash(op_name(op)));
  c.place = hash(node);
  const std::string values = attributes.text("values").value_or("");
  for (size_t begin = 0; begin < values.size();) {
    const size_t end = std::min(values.find(kNextTensor, begin), values.size());
    c.values.push_back(values.substr(begin, end - begin));
    begin = end + kNextTensor.size();
  }
  return c;
}

Shape output_shape(const Collective& c, const Shape& input) {
  Shape shape = input;
  const int64_t g = c.size();
  const auto divide = [&](const char* name) {
    const size_t axis = static_cast<size_t>(normal_axis(c.axis, input.size(), name));
    if (shape[axis] < 0) return;
    if (shape[axis] % g != 0) {
      throw std::invalid_argument("dim " + std::to_string(axis) + " of the input " +
                                  to_text(input) + " is not divisible by the group's " +
                                  std::to_string(g) + " ranks");
    }
    shape[axis] /= g;
  };
  const auto multiply = [&](int64_t axis, const char* name) {
    const size_t a = static_cast<size_t>(normal_axis(axis, input.size(), name));
    if (shape[a] >= 0 && __builtin_mul_overflow(shape[a], g, &shape[a])) {
      throw std::invalid_argument("dim " + std::to_string(a) + " of the input " + to_text(input) +
                                  " is too large for a group of " + std::to_string(g) + " ranks");
    }
  };
  if (c.op == Op::kAllGather) multiply(c.axis, "axis");
  if (c.op == Op::kReduceScatter) divide("axis");
  if (c.op == Op::kAllToAll) {
    divide("split_axis");
    multiply(c.concat_axis, "concat_axis");
  }
  return shape;
}

int64_t bytes_sent(const Collective& c, int index, int64_t n) {
  const int64_t g = c.size();
  switch (c.op) {
    case Op::kAllReduce: return 2 * n * (g - 1) / g;
    case Op::kAllGather: return n * (g - 1);
    case Op::kReduceScatter:
    case Op::kAllToAll:
    case Op::kBroadcast: return n * (g - 1) / g;
    case Op::kPermute:
      return std::any_of(c.pairs.begin(), c.pairs.end(),
                         [&](const Pair& p) {
                           return p.source == index && p.destination != index;
                         })
                 ? n
                 : 0;
    default: return 0;
  }
}

void HostMemory::copy(void* to, const void* from, size_t bytes, Stream) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

void HostMemory::zero(void* to, size_t bytes, Stream) {
  if (bytes != 0) std::memset(to, 0, bytes);
}

void HostMemory::interleave(void* to, const void* from, size_t outer, size_t parts, size_t chunk,
                            Stream) {
  if (chunk == 0) return;
  std::byte* target = static_cast<std::byte*>(to);
  const std::byte* source = static_cast<const std::byte*>(from);
  for (size_t p = 0; p < parts; ++p) {
    for (size_t o = 0; o < outer; ++o) {
      std::memcpy(target + (p * outer + o) * chunk, source + (o * parts + p) * chunk, chunk);
    }
  }
}

std::byte* HostMemory::scratch(size_t slot, size_t bytes, Stream) {
  Slab& slab = slabs_[slot];
  if (slab.size < bytes) {
    slab.data.reset(new std::byte[bytes]);
    slab.size = bytes;
  }
  return slab.data.get();
}

void HostMemory::trim() {
  for (Slab& slab : slabs_) {
    if (slab.size > kKeptScratch) slab = {};
  }
}

void execute(Transport& transport, Group& group, const Collective& c,
             const List<Operand>& operands, DType type, Memory& memory, Stream stream,
             CallLog& log, bool behind) {
  if (group.ranks.size() == 1) {
    const bool zeros = c.op == Op::kPermute && c.pairs.empty();
    for (const Operand& operand : operands) {
      const size_t bytes = bytes_of(operand.input, type);
      if (zeros) memory.zero(operand.out, bytes, stream);
      if (!zeros && operand.in != operand.out) {
        memory.copy(operand.out, operand.in, bytes, stream);
      }
    }
    return;
  }
  const CollectiveCall call(c, type, operands);
  const auto& [in, out, input] = operands[0];
  const size_t bytes = bytes_of(input, type);
  size_t all = 0;
  for (const Operand& operand : operands) all += bytes_of(operand.input, type);
  CallLog::Entry entry(log, CallKind::kCollective, c.where, group,
                       static_cast<int64_t>(operands.size()), static_cast<int64_t>(all));
  entry.follow(call);
  entry.on(stream);
  if (behind) entry.behind();
  switch (c.op) {
    case Op::kAllReduce: all_reduce(transport, group, call, stream); break;
    case Op::kAllGather: all_gather(transport, group, call, memory, stream); break;
    case Op::kReduceScatter: reduce_scatter(transport, group, call, memory, stream); break;
    case Op::kAllToAll: all_to_all(transport, group, call, bytes, memory, stream); break;
    case Op::kBroadcast: transport.broadcast(group, call, in, out, bytes, c.root, stream); break;
    case Op::kPermute: transport.permute(group, call, in, out, bytes, c.pairs, stream); break;
    default: throw std::logic_error(std::string(op_name(c.op)) + " is not a collective");
  }
  memory.trim();
}

}  // namespace onnxpar
