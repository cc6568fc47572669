// Collectives between ranks of one machine, through memory that all members of a group have mapped.
//
// Each member owns a header and two slots. A collective is a sequence of steps, with the same numbers
// on all members. In a step a member
//   1. packs the part of its input that others need into its slot of the step's parity,
//   2. announces in its header the number of the step, and a hash of its call,
//   3. waits until all members have announced the step,
//   4. unpacks from their slots.
// One wait per step is enough: a member that has announced step n + 1 has read all it needs of step
// n, and no member packs for step n + 2, into the slots of step n, before all have announced n + 1.
//
// Data goes in pieces that fit into a slot, and so stays in the caches between two copies. A piece may
// have parts of several tensors. A member
// reads the hash with each announcement, so a call on which the members differ is found before any of
// its data is used, at no cost.
//
// A reduced element is computed by one member, or by all from the same slots in the same order. So
// the results are equal to the bit on all ranks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "abi/dtype.h"
#include "transport/transport.h"

namespace onnxpar {

class SharedGroup {
 public:
  // Is called between two looks of a member that waits, with the number of calls in this wait before.
  using Idle = std::function<void(uint64_t calls)>;

  // Size of the memory for a number of members.
  static size_t bytes(int members);

  // `memory` is aligned to cache lines, zero before the first call of any member, and outlives this. A
  // waiting member looks `looks` times before it calls `idle` between two looks.
  SharedGroup(std::byte* memory, int index, int members, int looks, Idle idle);

  // The members for which this one waits. Another thread may call it.
  std::vector<int> missing() const;

  // Only compares the call. It throws Conflict, on all members.
  void agree(const Call&);
  // As in Transport. They throw Conflict, on all members.
  void all_reduce(const Call&, const Blocks&, DType, Reduction);
  void all_gather(const Call&, const Blocks&);
  void reduce_scatter(const Call&, const Blocks&, DType, Reduction);
  void all_to_all(const Call&, const void* in, void* out, size_t bytes);
  void broadcast(const Call&, const void* in, void* out, size_t bytes, int root);
  void permute(const Call&, const void* in, void* out, size_t bytes,
               const std::vector<Pair>& pairs);

 private:
  struct Header;

  Header& header(int member) const;
  std::byte* slot(int member) const;  // of the current step's parity
  // Calls pack(own slot), then unpack() once all members have packed.
  template <class Pack, class Unpack>
  void step(const Call& call, Pack pack, Unpack unpack);
  // Copies `in` to the slot if this member gives, and the giver's slot to `out` unless it is negative.
  void pass(const Call& call, const void* in, void* out, size_t bytes, bool gives, int giver);
  void announce(const Call& call);
  // Whether all members announced the same call in the current step.
  bool meet(const Call& call);
  void wait(const std::atomic<uint64_t>& step) const;
  [[noreturn]] void disagree(const Call& call);

  std::byte* const memory_;
  const int index_;
  const int members_;
  const int looks_;
  const Idle idle_;
  uint64_t step_ = 0;
  // The sources of a reduction, by member: their slots, and what is reduced now.
  std::vector<const std::byte*> slots_;
  std::vector<const void*> sources_;
};

}  // namespace onnxpar
