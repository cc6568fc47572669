// What a transport offers to the operators: collectives over blocks of contiguous memory.
//
// Transports of host memory are `threads` (all ranks in one process) and `mpi` (one rank per process,
// in a library of its own); a rank has one of them. Where it computes on a GPU it has besides one of
// device memory, `nccl` or `staged`, which stands on the first. The operators know nothing else of how
// data moves. Rules for every implementation:
//   - All ranks of a group call the same collectives on it in the same order (operators are chained
//     by tokens). Calls on different lanes match separately.
//   - When a call returns, the output is complete (on `stream`, where there is one) and no other
//     rank reads this rank's input any more.
//   - Results of a reduction are equal to the bit on all ranks and from run to run.
//   - Failures are exceptions of type std::runtime_error. None may leave a rank waiting for ever.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "abi/dtype.h"
#include "abi/values.h"

namespace onnxpar {

// Separate matching spaces on the same ranks, so that a collective running in the background
// (Start/Wait) cannot be taken for one running in the foreground.
enum class Lane : int { kMain = 0, kAsync = 1 };
inline constexpr int kLanes = 2;

// Tags of messages are below it. MPI takes any up to 32767, and those that are a few times larger
// wherever it is used.
inline constexpr int kTags = 1 << 15;

// A group of ranks as one member sees it. Made and owned by the transport.
struct Group {
  std::vector<int> ranks;  // global ranks; the position is the rank within the group
  int index = 0;           // of this rank
  Lane lane = Lane::kMain;
  int size() const { return static_cast<int>(ranks.size()); }
  virtual ~Group() = default;
};

// Which call this is: for messages, and for the agreement check.
struct Call {
  explicit Call(std::string_view name, uint64_t hash = 0) : where(name), signature(hash) {}
  virtual ~Call() = default;
  // What must agree between the ranks; made only where a message or a comparison needs it.
  virtual std::string detail() const { return {}; }
  // "AllReduce '/fc1/all_reduce' with AllReduce float32 [3] reduction=sum"
  std::string text() const;

  std::string_view where;  // "AllReduce '/fc1/all_reduce'"; outlives the call
  uint64_t signature;      // hash of what must agree; 0 where it is not a collective
};

struct Pair {
  int source;       // index within the group
  int destination;  // index within the group
};

// FNV-1a of the text, or of the number's bytes, from the hash `h` of what came before.
inline constexpr uint64_t kHashStart = 14695981039346656037u;
inline uint64_t hash(std::string_view text, uint64_t h = kHashStart) {
  for (char c : text) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return h;
}
// Cheap enough for every call: the number goes in whole, and its high bits come down by a shift.
inline uint64_t hash(uint64_t number, uint64_t h) {
  h = (h ^ number) * 0x9e3779b97f4a7c15u;
  return h ^ (h >> 32);
}

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Whether two threads of this rank may communicate at once, on different lanes.
  virtual bool concurrent() const = 0;

  // The group, made at its first use. Members call this; others need not know of it.
  virtual Group& group(const std::vector<int>& ranks, Lane lane) = 0;

  // out may equal in.
  virtual void all_reduce(Group&, const Call&, const void* in, void* out, size_t count, DType,
                          Reduction, Stream) = 0;
  // in: `bytes`; out: one block of `bytes` per member.
  virtual void all_gather(Group&, const Call&, const void* in, void* out, size_t bytes,
                          Stream) = 0;
  // in: one block of `count` elements per member; out: the reduced block of this member.
  virtual void reduce_scatter(Group&, const Call&, const void* in, void* out, size_t count, DType,
                              Reduction, Stream) = 0;
  // in: a block of `bytes` for each member; out: a block of `bytes` from each.
  virtual void all_to_all(Group&, const Call&, const void* in, void* out, size_t bytes,
                          Stream) = 0;
  // out may equal in. `root` is an index within the group.
  virtual void broadcast(Group&, const Call&, const void* in, void* out, size_t bytes, int root,
                         Stream) = 0;
  // Each member receives from at most one; a member that receives from none gets zeros.
  virtual void permute(Group&, const Call&, const void* in, void* out, size_t bytes,
                       const std::vector<Pair>& pairs, Stream) = 0;
  // Buffered: returns without waiting for the receiver. `peer` is a global rank.
  virtual void send(const Call&, int peer, int tag, const void* in, size_t bytes, Stream) = 0;
  // On the background lane several threads may receive at once, each from a peer of its own, while
  // the foreground does anything. Such a call has no time limit until something was sent, and is no
  // part of a deadlock: it may be made long before anyone waits for it, and who does minds the time.
  virtual void recv(const Call&, int peer, int tag, void* out, size_t bytes, Lane lane, Stream) = 0;

  // Throws where all was aborted. Of use where a call returns before it is carried out.
  virtual void check_alive() const {}
  // Ends all communication: ranks that wait, and later calls, fail with this message.
  virtual void abort(const std::string& message) = 0;
  // Makes calls that wait fail, where the transport can. Comes before close(); other threads may
  // still be in a call.
  virtual void stop() = 0;
  // Gives back what the transport holds. No calls run, and none may follow.
  virtual void close() = 0;
};

// "rank 1: AllReduce 'n' on group [0, 1]"
std::string describe(int rank, const Call& call, const std::vector<int>& group);

struct TransportOptions {
  bool debug = true;
  double timeout_s = 60;  // how long one call may wait before it fails; 0: for ever
};

// One transport per rank, sharing one set of ranks in this process.
std::vector<std::unique_ptr<Transport>> make_threads_transport(int size,
                                                               const TransportOptions& options);

}  // namespace onnxpar
