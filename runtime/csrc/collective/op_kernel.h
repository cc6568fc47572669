// The common part of the kernels of collectives, for both providers.
#pragma once

#include <memory>
#include <string>

#include "abi/operator.h"
#include "collective/collective.h"
#include "collective/world.h"

namespace onnxpar {

// The kernel of a node that acts as a rank.
class RankKernel : public Kernel {
 public:
  RankKernel(const Node& node, std::string where)
      : Kernel(std::move(where)), rank_(*node.rank), outputs_(node.outputs) {}
  std::string describe() const override { return at(where_); }
  // Collectives in the background still use the memory of the run's tensors.
  void failed() override { rank_.finish_started(); }
  // Messages of transports already name rank and node.
  std::string failure(const std::string& what) const override { return what; }

 protected:
  std::string at(const std::string& where) const {
    return "rank " + std::to_string(rank_.rank()) + ": " + where;
  }
  // What a Wait says whose first input no Start has made.
  std::string not_started() const {
    return describe() + ": its first input is not the result of a Start that still runs";
  }
  // Whether the node uses its optional last output, the token.
  bool has_output(size_t index) const { return index < outputs_; }
  RankContext& rank_;

 private:
  const size_t outputs_;
};

// "Send 'node'"
std::string where_of(Op op, const Node& node);
// The attributes of a node of one of the collectives, or of a Start or Wait of one. Throws
// std::invalid_argument.
Collective collective_of(Op op, const Node& node);
// Throws std::invalid_argument if this rank is not in the group.
void require_member(const RankContext& rank, const Collective& collective);

// peer and tag of a Send or Recv. Throws std::invalid_argument.
struct Peer {
  explicit Peer(const Node& node);
  int rank;
  int tag;
};
// Throws std::invalid_argument if a tensor of a call has another type than its first.
void require_type(const Tensor& x, DType first);

// The shape of the result of a node with these attributes that waits for what `started` began on `in`
// with the shape `input`. Throws std::invalid_argument if its tensor `x` is another, or the attributes
// are.
Shape waited_shape(const Collective& own, const Tensor& x, const Collective& started,
                   const void* in, const Shape& input);

// The kernel of an operator for tensors in host memory, and for tensors on the rank's GPU. Throw
// std::invalid_argument if the attributes are wrong.
std::unique_ptr<Kernel> make_host_kernel(Op op, const Node& node);
std::unique_ptr<Kernel> make_device_kernel(Op op, const Node& node);
// The same for a collective whose attributes have other names.
std::unique_ptr<Kernel> make_host_collective(const Node& node, Collective collective);
std::unique_ptr<Kernel> make_device_collective(const Node& node, Collective collective);

}  // namespace onnxpar
