// Collectives between ranks of several machines that have equally many members each.
//
// Members on one machine share memory (transport/shared.h), and those at the same position on each
// machine send messages to one another (transport/messages.h). An all-reduce reduces within each
// machine, of which each member takes a share, then between machines, and gathers within each machine.
// So a machine sends as much as if it had one member, not as many times as it has members.
//
// A reduced element is reduced in the order of the group within a machine, then in the order of the
// machines. The result is equal to the bit on all ranks and does not depend on the size of the tensor.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "transport/messages.h"
#include "transport/shared.h"
#include "transport/transport.h"

namespace onnxpar {

// Where the members of a group are.
class Machines {
 public:
  // `machine_of` is the number of the machine, by global rank.
  Machines(const std::vector<int>& ranks, const std::vector<int>& machine_of);
  int count() const { return static_cast<int>(members_.size()); }
  // The members of each machine; indices within the group, ascending.
  const std::vector<int>& members(int machine) const { return members_[static_cast<size_t>(machine)]; }
  // Whether there are several machines with equally many members, of more than one.
  bool nested() const;
  // Whether the members of a machine are neighbours in the group, machine after machine.
  bool in_blocks() const;
  int machine(int member) const;
  int position(int member) const;  // among the members of its machine

 private:
  std::vector<std::vector<int>> members_;
};

class NestedGroup {
 public:
  // `near` are the members of the machine of member `index`, `far` those at its position on all
  // machines, `all` all members.
  NestedGroup(const Machines& machines, int index, SharedGroup& near, MessageGroup& far,
              MessageGroup& all);

  // The members for which this one waits. Another thread may call it.
  std::vector<int> missing() const;

  // As in Transport. They throw Conflict, on all members, and MpiError.
  void all_reduce(const Call&, const Blocks&, DType, Reduction);
  void all_gather(const Call&, const Blocks&);
  void reduce_scatter(const Call&, const Blocks&, DType, Reduction);
  void all_to_all(const Call&, const void* in, void* out, size_t bytes);
  void broadcast(const Call&, const void* in, void* out, size_t bytes, int root);
  void permute(const Call&, const void* in, void* out, size_t bytes,
               const std::vector<Pair>& pairs);

 private:
  // Calls f once the members on this machine agree. What f first calls on `far` must be for all members:
  // it throws Conflict at all positions or none, because the members of each machine agree.
  template <class F>
  void agreed(const Call& call, F f);
  void reduce_some(const Call& call, const Blocks& blocks, DType type, Reduction reduction);
  std::byte* scratch(size_t slot, size_t bytes);

  const Machines machines_;
  const int index_;
  SharedGroup& near_;
  MessageGroup& far_;
  MessageGroup& all_;
  std::vector<std::byte> scratch_[2];
};

}  // namespace onnxpar
