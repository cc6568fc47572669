// Collectives between ranks of several machines, by messages of MPI.
//
// A collective begins with one message from each member to each other: a hash of its call, and with it
// the data, if the data for one member is at most a few KiB. So a small collective takes the time of
// one message. Members whose hashes differ throw before any of the data is used.
//
// Larger data follows in pieces, several of which are under way at once, directly from member to
// member. The tensors of a call are cut as if they were one; a datatype of MPI describes a piece that has
// parts of several. A reduced element is computed by one member, in the order of the group, and so it is equal
// to the bit on all ranks, and equal to the result in shared memory. While the sums of one piece
// return, the parts of the next are on their way, so that the link is in use in both directions.
//
// The thread that calls a collective drives its messages: nothing else does while it runs, and each
// lane has a communicator of its own. It looks for messages that have arrived and sleeps between two
// looks. MPI's own waiting would look without a pause: where all cores compute, it would keep the
// other side, and the system's handling of the network, from running.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "transport/mpi_support.h"
#include "transport/transport.h"

namespace onnxpar {

// How a thread waits for messages: at first it looks for the time `busy`, soon giving up its core
// between two looks; then it sleeps between two looks, the longer the longer nothing arrives.
class Patience {
 public:
  explicit Patience(Clock::duration busy) : busy_(busy) {}
  // Something has arrived.
  void renew();
  // Nothing has; comes between two looks.
  void pause();

 private:
  const Clock::duration busy_;
  bool waiting_ = false;
  Clock::time_point since_;  // if waiting
  std::chrono::microseconds sleep_{0};
};

// Memory that one message holds, in order: a part of one tensor, or of several.
struct Run {
  std::byte* data;
  size_t bytes;
};
using Runs = std::vector<Run>;

// Messages under way between this member and others, each with what is to be done once it is complete,
// and copies.
class Flow {
 public:
  using Then = std::function<void()>;

  // Between the `members` ranks of the communicator.
  Flow(MPI_Comm comm, int members, Clock::duration busy)
      : comm_(comm), patience_(busy), expected_(static_cast<size_t>(members)) {}
  // The members whose messages have not come. Another thread may call it.
  std::vector<int> missing() const;
  void send(const Runs& from, int peer, int tag, Then then = nullptr);
  void receive(const Runs& to, int peer, int tag, Then then = nullptr);
  // Copies in this member's memory, while nothing arrives.
  void copy(void* to, const void* from, size_t bytes);
  // Returns when all that was asked for is complete, including what followed other messages.
  void finish();

 private:
  struct Copy {
    std::byte* to;
    const std::byte* from;
    size_t bytes;
  };
  // Begins a message with `begin`, MPI_Isend or MPI_Irecv.
  template <class Begin>
  void post(Begin begin, const char* what, const Runs& runs, int peer, int tag, Then then);
  // Copies a part; whether there was one.
  bool copy_some();

  const MPI_Comm comm_;
  Patience patience_;
  std::vector<MPI_Request> requests_;
  std::vector<Then> then_;  // by request
  std::vector<int> senders_;  // by request; -1 if it is a send
  std::vector<std::atomic<int>> expected_;  // messages by sender that have not come
  std::vector<int> complete_;
  std::deque<Copy> copies_;
};

class MessageGroup {
 public:
  // The members are the ranks of the communicator, which outlives this.
  MessageGroup(MPI_Comm comm, Clock::duration busy);

  // The members for which this one waits. Another thread may call it.
  std::vector<int> missing() const { return flow_.missing(); }

  // Only compares the call. It throws Conflict, on all members, and MpiError.
  void agree(const Call& call) { meet(call); }
  // As in Transport. They throw Conflict, on all members, and MpiError.
  void all_reduce(const Call&, const Blocks&, DType, Reduction);
  void all_gather(const Call&, const Blocks&);
  void reduce_scatter(const Call&, const Blocks&, DType, Reduction);
  void all_to_all(const Call&, const void* in, void* out, size_t bytes);
  void broadcast(const Call&, const void* in, void* out, size_t bytes, int root);
  void permute(const Call&, const void* in, void* out, size_t bytes,
               const std::vector<Pair>& pairs);

 private:
  // The memory of some of the bytes that a member gets, or that come from it; none if there are none.
  using Bytes = std::function<Runs(int member, Range bytes)>;
  // The elements that a member reduces, of all tensors together, in one piece of a reduction.
  using Parts = std::function<Range(size_t piece, int member)>;

  // Exchanges the first messages. With them, the first `bytes` go to each member that gets any.
  void meet(const Call& call, size_t bytes = 0, const Bytes& given = nullptr);
  // The data in a member's first message.
  std::byte* first(int member);
  [[noreturn]] void disagree(const Call& call);
  // Calls f for each other member, beginning with the next, so that not all send to the same at once.
  template <class F>
  void others(F f) const;

  // Sends bytes to each member that gets any, and receives them.
  void exchange(const Call& call, size_t bytes, const Bytes& given, const Bytes& taken);
  // Sends this and every window_-th further piece of the bytes, one after the other. The function must
  // live until the flow has finished; so must that of `receive`.
  void send(const Bytes& given, Range bytes, int peer, size_t piece);
  // Calls then(piece), if there is one, for each that has come.
  void receive(const Bytes& taken, Range bytes, int peer, size_t piece,
               const std::function<void(size_t)>& then = nullptr);
  // Reduces this member's parts of all pieces, and if `gather`, brings all members' results to all.
  // `given` is what each member reduces.
  void reduce(size_t pieces, const Parts& parts, const Bytes& given, const Bytes& taken,
              bool gather, DType type, Reduction reduction);
  // Of data that came with the first messages.
  void reduce_first(const Bytes& given, const Bytes& taken, size_t count, DType type,
                    Reduction reduction);

  const MPI_Comm comm_;
  int index_ = 0;
  int members_ = 0;
  size_t piece_ = 0;   // bytes in one message
  size_t window_ = 0;  // pieces under way at once, for each other member
  Flow flow_;
  std::vector<std::byte> own_;     // first messages that this member sends, by receiver
  std::vector<std::byte> theirs_;  // those that it receives, by sender
  std::vector<std::byte> parts_;   // received, of pieces under way
  std::vector<const void*> sources_;  // of a reduction, by member
};

}  // namespace onnxpar
