#include "collective/op_kernel.h"

#include <algorithm>
#include <stdexcept>

namespace onnxpar {

std::string where_of(Op op, const Node& node) {
  return std::string(op_name(op)) + " '" + node.attributes.node() + "'";
}

Collective collective_of(Op op, const Node& node) {
  const bool several = op == Op::kStartAhead || op == Op::kBucket || op == Op::kFinishLater;
  const bool of_another = several || op == Op::kStart || op == Op::kWait;
  const Op which =
      of_another ? collective_from_name(node.attributes.text("op").value_or("")) : op;
  if (several && which != Op::kAllReduce && which != Op::kReduceScatter &&
      which != Op::kAllGather) {
    throw std::invalid_argument("op is '" + std::string(op_name(which)) +
                                "', expected AllReduce, ReduceScatter or AllGather");
  }
  Collective c =
      parse_collective(which, node.attributes.node(), node.attributes, node.rank->size());
  if (of_another) c.where = where_of(op, node) + " (" + op_name(which) + ")";
  return c;
}

void require_member(const RankContext& rank, const Collective& collective) {
  const std::vector<int>& group = collective.group;
  if (std::find(group.begin(), group.end(), rank.rank()) != group.end()) return;
  throw std::invalid_argument("rank " + std::to_string(rank.rank()) + " is not in its group " +
                              to_text(group));
}

Peer::Peer(const Node& node) {
  const int64_t peer = node.attributes.need_integer("peer");
  const int64_t number = node.attributes.integer("tag").value_or(0);
  if (peer < 0 || peer >= node.rank->size() || peer == node.rank->rank()) {
    throw std::invalid_argument("peer is " + std::to_string(peer) +
                                ", expected another rank of a world of " +
                                std::to_string(node.rank->size()));
  }
  if (number < 0 || number >= kTags) {
    throw std::invalid_argument("tag is " + std::to_string(number) + ", expected 0 to " +
                                std::to_string(kTags - 1));
  }
  rank = static_cast<int>(peer);
  tag = static_cast<int>(number);
}

void require_type(const Tensor& x, DType first) {
  if (x.type == first) return;
  throw std::invalid_argument("expected tensors of one type, got " +
                              std::string(dtype_name(first)) + " and " + dtype_name(x.type));
}

Shape waited_shape(const Collective& own, const Tensor& x, const Collective& started,
                   const void* in, const Shape& input) {
  if (in != x.data || input != x.shape) {
    throw std::invalid_argument("its tensor is not the one that was given to " + started.where);
  }
  if (own.signature != started.signature || own.group != started.group) {
    throw std::invalid_argument("its attributes differ from those of " + started.where);
  }
  return output_shape(own, x.shape);
}

}  // namespace onnxpar
