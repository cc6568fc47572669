// The interface of transports: collectives over blocks of contiguous memory.
//
// Transports of host memory are `threads` (all ranks in one process) and `mpi` (one rank per process,
// in its own library); a rank has one of them. A rank on a GPU also has a transport of device memory,
// `nccl` or `staged`, which uses the first. The operators only know this interface. Rules for every
// implementation:
//   - All ranks of a group call the same collectives on it in the same order (operators are chained
//     by tokens). Calls on different lanes match separately.
//   - When a call returns, the output is complete (on `stream`, if there is one) and no other rank
//     still reads this rank's input.
//   - Results of a reduction are equal to the bit on all ranks and in all runs.
//   - Failures are exceptions of type std::runtime_error. No rank may wait forever.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "abi/dtype.h"
#include "abi/values.h"
#include "transport/blocks.h"

namespace onnxpar {

// Separate matching spaces on the same ranks, so that a collective in the background (Start/Wait) is
// never matched with one in the foreground.
enum class Lane : int { kMain = 0, kAsync = 1 };
inline constexpr int kLanes = 2;

// Tags of messages are smaller. MPI allows all tags up to 32767, and its implementations allow tags
// that are a few times larger.
inline constexpr int kTags = 1 << 15;

// A group of ranks for one of its members. Made and owned by the transport.
struct Group {
  std::vector<int> ranks;  // global ranks; the position is the rank within the group
  int index = 0;           // this rank's position
  Lane lane = Lane::kMain;
  int size() const { return static_cast<int>(ranks.size()); }
  virtual ~Group() = default;
};

// The steady clock, in nanoseconds.
inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The identity of a call, for messages and for the agreement check.
struct Call {
  explicit Call(std::string_view name, uint64_t hash = 0) : where(name), signature(hash) {}
  virtual ~Call() = default;
  // A description of all that must be equal on all ranks; only made if it is needed.
  virtual std::string detail() const { return {}; }
  // "AllReduce '/fc1/all_reduce' with AllReduce float32 [3] reduction=sum"
  std::string text() const;
  // Transports call it when all members have come, or the sender's message; of members on several
  // machines, when those of all machines have.
  void met(bool machines = false) const {
    if (met_ns != 0 && (!machines || machines_met)) return;
    met_ns = now_ns();
    machines_met = machines;
  }

  std::string_view where;  // "AllReduce '/fc1/all_reduce'"; outlives the call
  uint64_t signature;      // hash of all that must be equal on all ranks; 0 unless a collective
  mutable int64_t met_ns = 0;  // the time of `met`; 0 before
  mutable bool machines_met = false;
};

// Stands before each tensor in the text of a call that has several.
inline constexpr std::string_view kNextTensor = "; ";
// Bytes of the text of a call that members exchange if they differ.
inline constexpr size_t kText = size_t{16} << 10;

// What of the text of a call shows how it differs from another: of several tensors, the first that does.
std::string differing(const std::string& text, const std::string& other);

// Another member makes another call; all members throw it.
struct Conflict : std::runtime_error {
  Conflict(int other, const std::string& text) : std::runtime_error(text), member(other) {}
  int member;  // index within the group; what() is its `Call::text`
};

struct Pair {
  int source;       // index within the group
  int destination;  // index within the group
};

// FNV-1a of the text, starting from the hash `h` of earlier values.
inline constexpr uint64_t kHashStart = 14695981039346656037u;
inline uint64_t hash(std::string_view text, uint64_t h = kHashStart) {
  for (char c : text) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return h;
}
// A faster hash of a number, for every call: one multiplication, and a shift for the high bits.
inline uint64_t hash(uint64_t number, uint64_t h) {
  h = (h ^ number) * 0x9e3779b97f4a7c15u;
  return h ^ (h >> 32);
}

// The share of one of `members` members in `count` elements, in whole cache lines, so that members do
// not write to the same line.
Range share_of(size_t count, int members, int index);

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Whether two threads of this rank may communicate at once, on different lanes.
  virtual bool concurrent() const = 0;
  // Whether a message from this rank arrives although neither rank calls the transport while it is under
  // way. Otherwise a thread should wait for it from the beginning (`recv` on the background lane).
  virtual bool prompt(int peer) const = 0;

  // The group, made at its first use. Only its members call this.
  virtual Group& group(const std::vector<int>& ranks, Lane lane) = 0;
  // Whether data of the group's calls travels while this rank computes. If not, the rank's processor
  // moves it, and a call in the background only disturbs the computation. Equal for all members.
  virtual bool overlaps(const Group&) const { return false; }

  // Reductions and gathers take several tensors in one call. Results of host transports are equal to
  // the bit to those of a call for each.
  // Each tensor has `count` elements; its out may equal its in.
  virtual void all_reduce(Group&, const Call&, const Blocks&, DType, Reduction, Stream) = 0;
  // in: `count` bytes; out: as many of each member.
  virtual void all_gather(Group&, const Call&, const Blocks&, Stream) = 0;
  // in: `count` elements for each member; out: the reduced elements of this member.
  virtual void reduce_scatter(Group&, const Call&, const Blocks&, DType, Reduction, Stream) = 0;
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
  // On the background lane several threads may receive at once, each from another peer, while the
  // foreground works. Such a call has no time limit until something was sent, and does not count in
  // the detection of deadlocks: it may be made long before its result is needed, and the thread that
  // waits for the result has its own time limit.
  virtual void recv(const Call&, int peer, int tag, void* out, size_t bytes, Lane lane, Stream) = 0;

  // Throws if the world was aborted; for transports whose calls return before they are carried out.
  virtual void check_alive() const {}
  // Ends all communication: ranks that wait, and later calls, fail with this message.
  virtual void abort(const std::string& message) = 0;
  // Makes waiting calls fail, if the transport can. Comes before close(); other threads may still be
  // in a call.
  virtual void stop() = 0;
  // Frees the transport's resources. No calls run, and none may follow.
  virtual void close() = 0;
};

// "rank 1: AllReduce 'n' on group [0, 1]"
std::string describe(int rank, const Call& call, const std::vector<int>& group);
// "rank 1: … on group [0, 1, 2]: waited 60 s for rank 2 (ONNXPAR_TIMEOUT)". `missing` has the ranks that
// have not come; it is empty if the transport does not know them.
std::string waited(const std::string& who, double seconds, const std::vector<int>& missing = {});
// The ranks of a group at some of its indices.
std::vector<int> ranks_at(const std::vector<int>& group, const std::vector<int>& indices);

struct TransportOptions {
  bool debug = true;
  double timeout_s = 60;  // how long one call may wait before it fails; 0 means without a limit
  // Is called with the reason, which has been printed, before the transport ends the process.
  std::function<void(const std::string& reason)> failing = nullptr;
};

// One transport per rank, sharing one set of ranks in this process.
std::vector<std::unique_ptr<Transport>> make_threads_transport(int size,
                                                               const TransportOptions& options);

}  // namespace onnxpar
