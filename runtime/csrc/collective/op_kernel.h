// What the kernels of the operators in ops.cc have in common, on whichever provider.
#pragma once

#include <memory>
#include <string>

#include "abi/ort_io.h"
#include "collective/collective.h"
#include "collective/world.h"
#include "kernels/host/philox.h"

namespace onnxpar {

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
  bool has_output(size_t index) const { return index < outputs_; }
  RankContext& rank_;
  const std::string where_;

 private:
  size_t outputs_ = 0;
};

// The attributes of a node of one of the collectives, or of a Start or Wait of one. Throws
// std::invalid_argument.
Collective collective_of(Op op, const RankContext& rank, const KernelAttributes& attributes);
// Throws std::invalid_argument where this rank is not in the group.
void require_member(const RankContext& rank, const Collective& collective);

// peer and tag of a Send or Recv. Throws std::invalid_argument.
struct Peer {
  Peer(const RankContext& rank, const Attributes& attributes);
  int rank;
  int tag;
};
// The bytes of a tensor of this type and shape. Throws std::invalid_argument for a negative dim.
size_t bytes_of(const Shape& shape, DType type);

// The shape of what a Wait with these attributes gives. Throws std::invalid_argument where its tensor
// is not the one, at `in` with the shape `input`, that the Start of `started` was given, or where that
// had other attributes.
Shape waited_shape(const Collective& own, const Tensor& x, const Collective& started,
                   const void* in, const Shape& input);

// What a node of Philox says beside its inputs. Throws std::invalid_argument.
Distribution philox_distribution(const Attributes& attributes);

// The kernel of an operator for tensors in host memory, and for tensors on the rank's GPU (operators
// that ops.cc registers there). Throw std::invalid_argument where the attributes are wrong.
std::unique_ptr<Kernel> make_host_kernel(Op op, RankContext& rank,
                                         const KernelAttributes& attributes);
std::unique_ptr<Kernel> make_device_kernel(Op op, RankContext& rank,
                                           const KernelAttributes& attributes);

}  // namespace onnxpar
