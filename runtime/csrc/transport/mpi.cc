// The transport for ranks that are processes of an MPI job.
//
// Every group has its own communicators, one per lane, made by its members alone
// (MPI_Comm_create_group) at the first use. If all members are on one machine, they share memory, and
// collectives use that (transport/shared.h). The following is about groups on several machines.
//
// Sums of float32 and float64 use MPI's own operation; all others use ours (dtype.h), because Open MPI
// lacks them (16-bit floats) or does not define them for NaN and signed zero. All are commutative. So
// the algorithms of Open MPI, which give every rank the same tree or a copy of one result, agree to
// the bit. Sums and products of 16-bit floats are sent as float32 and rounded once, at the end: an
// operation on the 16-bit type would round at every step of the tree.
//
// An error that MPI reports ends the job, because it is unknown what the other ranks have received.
//
// Counts are 32-bit in Open MPI 5.0. Reductions are split into pieces anyway: Open MPI's temporaries
// for one large call cost more than the data. Copies beyond 1 GiB per block use a datatype that covers
// the block.
#include <dlfcn.h>
#include <mpi.h>

#include <atomic>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <optional>

#include "transport/mpi_entry.h"
#include "transport/mpi_memory.h"
#include "transport/mpi_support.h"
#include "transport/shared.h"

namespace onnxpar {
namespace {

constexpr size_t kPieceBytes = size_t{4} << 20;  // of a reduction
constexpr size_t kTextBytes = 512;
constexpr std::chrono::microseconds kShortestPause{10};  // between two polls for a message
constexpr std::chrono::microseconds kLongestPause{200};
constexpr std::chrono::seconds kPatience{5};  // for messages that are not received, at the end

struct MpiGroup : Group {
  MPI_Comm comm = MPI_COMM_NULL;
  // Set if all members are on one machine; then the communicator is not used for collectives.
  std::unique_ptr<SharedMemory> memory;
  std::unique_ptr<SharedGroup> shared;
};

// A message that was sent without waiting, kept until MPI has taken it.
struct Outgoing {
  std::vector<std::byte> data;
  std::vector<MPI_Request> requests;
};

// The members of a group call different collectives; the message is complete.
struct Disagreement : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Is sent before a message, so that a wrong size is an error and not a truncated tensor.
struct Header {
  uint64_t bytes;
};

class MpiTransport : public Transport {
 public:
  MpiTransport(MPI_Comm comm, const TransportOptions& options) : options_(options) {
    check(MPI_Comm_dup(comm, &world_), "MPI_Comm_dup");
    check(MPI_Comm_set_errhandler(world_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(MPI_Comm_rank(world_, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(world_, &size_), "MPI_Comm_size");
    int level = MPI_THREAD_SINGLE;
    check(MPI_Query_thread(&level), "MPI_Query_thread");
    concurrent_ = level == MPI_THREAD_MULTIPLE;
    // If ranks share cores, a waiting rank must not keep another from working.
    if (processes_on_node(world_) > sysconf(_SC_NPROCESSORS_ONLN)) looks_ = 0;
    watchdog_ = std::make_unique<Watchdog>(rank_, options_.timeout_s, world_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool concurrent() const override { return concurrent_; }

  Group& group(const std::vector<int>& ranks, Lane lane) override {
    auto& group = groups_[{lane, ranks}];
    if (group) return *group;
    const Call call("making the communicator");
    const Watchdog::Guard guard(*watchdog_, Lane::kMain, call, ranks);
    named(describe(rank_, call, ranks), [&] {
      auto made = std::make_unique<MpiGroup>();
      made->ranks = ranks;
      made->lane = lane;
      MPI_Group all = MPI_GROUP_NULL;
      MPI_Group members = MPI_GROUP_NULL;
      check(MPI_Comm_group(world_, &all), "MPI_Comm_group");
      check(MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &members),
            "MPI_Group_incl");
      // Tags up to 32767 are legal everywhere. Groups with equal tags still match rightly, since
      // ranks that share two groups make them in the same order.
      const int tag = static_cast<int>(
          hash(to_text(ranks) + (lane == Lane::kMain ? "main" : "async")) % 32768);
      check(MPI_Comm_create_group(world_, members, tag, &made->comm), "MPI_Comm_create_group");
      MPI_Group_free(&members);
      MPI_Group_free(&all);
      check(MPI_Comm_set_errhandler(made->comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
      check(MPI_Comm_rank(made->comm, &made->index), "MPI_Comm_rank");
      share(*made);
      group = std::move(made);
    });
    return *group;
  }

  void all_reduce(Group& group, const Call& call, const void* in, void* out, size_t count,
                  DType type, Reduction reduction, Stream) override {
    const auto near = [&](SharedGroup& shared) {
      shared.all_reduce(call, in, out, count, type, reduction);
    };
    run(group, call, near, [&](MPI_Comm comm) {
      const bool wide = accumulates_wide(type, reduction);
      const Operation operation = operations_.get(wide ? DType::kFloat32 : type, reduction);
      const size_t item = dtype_size(type);
      const size_t step = kPieceBytes / (wide ? sizeof(float) : item);
      std::vector<float>& piece = wide_[static_cast<int>(group.lane)];
      if (wide) piece.resize(std::max(piece.size(), std::min(step, count)));
      for (size_t begin = 0; begin < count; begin += step) {
        const size_t n = std::min(step, count - begin);
        const std::byte* from = static_cast<const std::byte*>(in) + begin * item;
        std::byte* to = static_cast<std::byte*>(out) + begin * item;
        if (wide) widen(piece.data(), from, n, type);
        check(MPI_Allreduce(wide || in == out ? MPI_IN_PLACE : from,
                            wide ? static_cast<void*>(piece.data()) : to, static_cast<int>(n),
                            operation.type, operation.op, comm),
              "MPI_Allreduce");
        if (wide) narrow(to, piece.data(), n, type);
      }
    });
  }

  void all_gather(Group& group, const Call& call, const void* in, void* out, size_t bytes,
                  Stream) override {
    const auto near = [&](SharedGroup& shared) { shared.all_gather(call, in, out, bytes); };
    run(group, call, near, [&](MPI_Comm comm) {
      const Bytes block(bytes);
      check(MPI_Allgather(in, block.count(), block.type(), out, block.count(), block.type(),
                          comm),
            "MPI_Allgather");
    });
  }

  void reduce_scatter(Group& group, const Call& call, const void* in, void* out, size_t count,
                      DType type, Reduction reduction, Stream) override {
    const auto near = [&](SharedGroup& shared) {
      shared.reduce_scatter(call, in, out, count, type, reduction);
    };
    run(group, call, near, [&](MPI_Comm comm) {
      const bool wide = accumulates_wide(type, reduction);
      const Operation operation = operations_.get(wide ? DType::kFloat32 : type, reduction);
      const size_t item = dtype_size(type);
      const size_t moved = wide ? sizeof(float) : item;
      const size_t members = group.ranks.size();
      const size_t step = std::max<size_t>(1, kPieceBytes / moved / members);
      const std::byte* from = static_cast<const std::byte*>(in);
      const auto reduce = [&](const void* blocks, void* to, size_t n) {
        check(MPI_Reduce_scatter_block(blocks, to, static_cast<int>(n), operation.type,
                                       operation.op, comm),
              "MPI_Reduce_scatter_block");
      };
      if (count <= step && !wide) return reduce(from, out, count);
      // A piece of every member's block, contiguous, and then memory for the result.
      const size_t largest = std::min(step, count);
      std::unique_ptr<std::byte[]> piece(new std::byte[(members + 1) * largest * moved]);
      std::byte* const result = piece.get() + members * largest * moved;
      for (size_t begin = 0; begin < count; begin += step) {
        const size_t n = std::min(step, count - begin);
        for (size_t i = 0; i < members; ++i) {
          std::byte* to = piece.get() + i * n * moved;
          const std::byte* block = from + (i * count + begin) * item;
          if (wide) {
            widen(reinterpret_cast<float*>(to), block, n, type);
          } else {
            std::memcpy(to, block, n * item);
          }
        }
        std::byte* to = static_cast<std::byte*>(out) + begin * item;
        reduce(piece.get(), wide ? result : to, n);
        if (wide) narrow(to, reinterpret_cast<const float*>(result), n, type);
      }
    });
  }

  void all_to_all(Group& group, const Call& call, const void* in, void* out, size_t bytes,
                  Stream) override {
    const auto near = [&](SharedGroup& shared) { shared.all_to_all(call, in, out, bytes); };
    run(group, call, near, [&](MPI_Comm comm) {
      const Bytes block(bytes);
      check(MPI_Alltoall(in, block.count(), block.type(), out, block.count(), block.type(), comm),
            "MPI_Alltoall");
    });
  }

  void broadcast(Group& group, const Call& call, const void* in, void* out, size_t bytes,
                 int root, Stream) override {
    const auto near = [&](SharedGroup& shared) { shared.broadcast(call, in, out, bytes, root); };
    run(group, call, near, [&](MPI_Comm comm) {
      if (group.index == root && in != out && bytes != 0) std::memcpy(out, in, bytes);
      const Bytes block(bytes);
      check(MPI_Bcast(out, block.count(), block.type(), root, comm), "MPI_Bcast");
    });
  }

  void permute(Group& group, const Call& call, const void* in, void* out, size_t bytes,
               const std::vector<Pair>& pairs, Stream) override {
    const auto near = [&](SharedGroup& shared) { shared.permute(call, in, out, bytes, pairs); };
    run(group, call, near, [&](MPI_Comm comm) {
      const Bytes block(bytes);
      std::vector<MPI_Request> requests;
      bool received = false;
      for (const Pair& pair : pairs) {
        if (pair.destination == group.index) {
          received = true;
          check(MPI_Irecv(out, block.count(), block.type(), pair.source, 0, comm,
                          &requests.emplace_back()),
                "MPI_Irecv");
        }
        if (pair.source == group.index) {
          check(MPI_Isend(in, block.count(), block.type(), pair.destination, 0, comm,
                          &requests.emplace_back()),
                "MPI_Isend");
        }
      }
      if (!received && bytes != 0) std::memset(out, 0, bytes);
      check(MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE),
            "MPI_Waitall");
    });
  }

  void send(const Call& call, int peer, int tag, const void* in, size_t bytes, Stream) override {
    named(describe(rank_, call, {rank_, peer}), [&] {
      std::lock_guard lock(outgoing_mutex_);
      reap();
      Outgoing& message = outgoing_.emplace_back();
      const Header header{bytes};
      const std::byte* head = reinterpret_cast<const std::byte*>(&header);
      const std::byte* data = static_cast<const std::byte*>(in);
      message.data.reserve(sizeof(header) + bytes);
      message.data.assign(head, head + sizeof(header));
      message.data.insert(message.data.end(), data, data + bytes);
      const auto post = [&](size_t begin, size_t length) {
        const Bytes block(length);
        check(MPI_Isend(message.data.data() + begin, block.count(), block.type(), peer, tag,
                        world_, &message.requests.emplace_back()),
              "MPI_Isend");
      };
      post(0, sizeof(header));
      post(sizeof(header), bytes);
    });
  }

  void recv(const Call& call, int peer, int tag, void* out, size_t bytes, Lane lane,
            Stream) override {
    const std::vector<int> ranks{peer, rank_};
    named(describe(rank_, call, ranks), [&] {
      std::optional<Watchdog::Guard> guard;
      if (lane == Lane::kMain) guard.emplace(*watchdog_, lane, call, ranks);
      const auto take = [&](void* to, const Bytes& block) {
        if (lane == Lane::kMain) {
          check(MPI_Recv(to, block.count(), block.type(), peer, tag, world_, MPI_STATUS_IGNORE),
                "MPI_Recv");
        } else {
          await(to, block, peer, tag, call);
        }
      };
      Header header{};
      take(&header, Bytes(sizeof(header)));
      if (header.bytes != bytes) {
        throw std::runtime_error("expected " + std::to_string(bytes) + " bytes, got " +
                                 std::to_string(header.bytes));
      }
      take(out, Bytes(bytes));
    });
  }

  void abort(const std::string& message) override { end_job(message); }

  // A call of MPI cannot be interrupted, but the watchdog limits its time. Receives in the background
  // have no limit and give up now; not at once, because other ranks may stop later.
  void stop() override { stopped_ = Clock::now().time_since_epoch(); }

  void close() override {
    watchdog_.reset();
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized != 0) return;  // MPI has freed all of it
    // A message that its receiver has not received by then keeps its memory: the transport is never
    // freed.
    const Clock::time_point end = Clock::now() + kPatience;
    for (reap(); !outgoing_.empty() && Clock::now() < end; reap()) std::this_thread::yield();
    for (auto& entry : groups_) MPI_Comm_free(&entry.second->comm);
    groups_.clear();
    operations_.free();
    MPI_Comm_free(&world_);
  }

 private:
  [[noreturn]] void end_job(const std::string& message) {
    std::fprintf(stderr, "r%d | %s\n", rank_, message.c_str());
    std::fflush(stderr);
    MPI_Abort(world_, 1);
    _exit(1);
  }

  template <class F>
  void named(const std::string& who, F&& f) {
    try {
      f();
    } catch (const MpiError& e) {
      end_job(who + ": " + e.what());
    } catch (const std::exception& e) {
      throw std::runtime_error(who + ": " + e.what());
    }
  }

  // Gives the group shared memory, if possible.
  void share(MpiGroup& group) {
    if (group.size() == 1) return;
    group.memory = share_memory(group.comm, SharedGroup::bytes(group.size()));
    if (!group.memory) return;
    // Pending messages may need this rank's progress, and another member may wait for them first.
    const auto progress = [comm = world_] {
      int found = 0;
      MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm, &found, MPI_STATUS_IGNORE);
    };
    group.shared = std::make_unique<SharedGroup>(group.memory->data(), group.index, group.size(),
                                                 looks_, progress);
  }

  // Calls near(SharedGroup&) if the group shares memory, else far(MPI_Comm).
  template <class Near, class Far>
  void run(Group& base, const Call& call, Near&& near, Far&& far) {
    MpiGroup& group = static_cast<MpiGroup&>(base);
    const Watchdog::Guard guard(*watchdog_, group.lane, call, group.ranks);
    try {
      if (group.shared) return near(*group.shared);
      compare(group, call);
      far(group.comm);
    } catch (const Conflict& e) {
      throw std::runtime_error(conflict(group, call.where, call.text(), e.member, e.what()));
    } catch (const Disagreement&) {
      throw;
    } catch (const MpiError& e) {
      end_job(describe(rank_, call, group.ranks) + ": " + e.what());
    } catch (const std::exception& e) {
      throw std::runtime_error(describe(rank_, call, group.ranks) + ": " + e.what());
    }
  }

  std::string conflict(const Group& group, std::string_view where, const std::string& own,
                       int other, const std::string& theirs) const {
    const std::string rank = std::to_string(group.ranks[static_cast<size_t>(other)]);
    return describe(rank_, Call(where), group.ranks) + ": disagrees with rank " + rank + ": got " +
           own + ", where rank " + rank + " calls " + theirs;
  }

  // Throws Disagreement if the members differ on this call, before its data moves: MPI does not check
  // sizes, and may write beyond the smaller buffer if they differ. It sends 16 bytes if the members
  // agree (a microsecond on one machine, a round trip between machines), else the texts of the calls.
  void compare(const MpiGroup& group, const Call& call) {
    uint64_t extremes[2] = {call.signature, ~call.signature};
    check(MPI_Allreduce(MPI_IN_PLACE, extremes, 2, MPI_UINT64_T, MPI_MAX, group.comm),
          "MPI_Allreduce");
    if (extremes[0] == ~extremes[1]) return;
    const size_t members = group.ranks.size();
    std::vector<uint64_t> signatures(members);
    check(MPI_Allgather(&call.signature, 1, MPI_UINT64_T, signatures.data(), 1, MPI_UINT64_T,
                        group.comm),
          "MPI_Allgather");
    const std::string own = call.text();
    std::vector<char> text(kTextBytes, '\0');
    std::memcpy(text.data(), own.data(), std::min(own.size(), kTextBytes - 1));
    std::vector<char> texts(kTextBytes * members);
    const int n = static_cast<int>(kTextBytes);
    check(MPI_Allgather(text.data(), n, MPI_CHAR, texts.data(), n, MPI_CHAR, group.comm),
          "MPI_Allgather");
    size_t other = 0;
    while (signatures[other] == call.signature) ++other;
    throw Disagreement(
        conflict(group, call.where, own, static_cast<int>(other), &texts[other * kTextBytes]));
  }

  // Receives without keeping a core busy: MPI's own waiting would poll without a pause. Polling also
  // advances the messages that this rank sends, while its foreground computes.
  void await(void* out, const Bytes& block, int peer, int tag, const Call& call) {
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Irecv(out, block.count(), block.type(), peer, tag, world_, &request), "MPI_Irecv");
    std::chrono::microseconds pause = kShortestPause;
    for (int look = 0;; ++look) {
      int here = 0;
      check(MPI_Test(&request, &here, MPI_STATUS_IGNORE), "MPI_Test");
      if (here != 0) return;
      if (look < looks_) continue;
      const Clock::duration stopped = stopped_;
      if (stopped.count() != 0 && Clock::now().time_since_epoch() > stopped + kPatience) {
        check(MPI_Cancel(&request), "MPI_Cancel");
        check(MPI_Wait(&request, MPI_STATUS_IGNORE), "MPI_Wait");
        throw std::runtime_error(std::string(call.where) + ": the world was closed");
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
  }

  // Forgets the messages that MPI has taken.
  void reap() {
    for (auto it = outgoing_.begin(); it != outgoing_.end();) {
      int taken = 0;
      check(MPI_Testall(static_cast<int>(it->requests.size()), it->requests.data(), &taken,
                        MPI_STATUSES_IGNORE),
            "MPI_Testall");
      it = taken != 0 ? outgoing_.erase(it) : std::next(it);
    }
  }

  const TransportOptions options_;
  MPI_Comm world_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 0;
  bool concurrent_ = false;
  int looks_ = 2000;  // about 30 microseconds
  Operations operations_;
  std::unique_ptr<Watchdog> watchdog_;
  std::map<std::pair<Lane, std::vector<int>>, std::unique_ptr<MpiGroup>> groups_;
  std::atomic<Clock::duration> stopped_{Clock::duration::zero()};
  std::mutex outgoing_mutex_;
  std::list<Outgoing> outgoing_;
  std::vector<float> wide_[kLanes];  // one piece of a reduction of 16-bit floats
};

}  // namespace
}  // namespace onnxpar

#define ONNXPAR_MPI_EXPORT extern "C" __attribute__((visibility("default")))

ONNXPAR_MPI_EXPORT onnxpar::Transport* onnxpar_mpi_transport(
    const void* communicator, const onnxpar::TransportOptions& options) {
  return new onnxpar::MpiTransport(*static_cast<const MPI_Comm*>(communicator), options);
}

// Which MPI this library was bound to when it was loaded; callable before MPI is initialised.
ONNXPAR_MPI_EXPORT const char* onnxpar_mpi_version() {
  static char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  return text;
}
ONNXPAR_MPI_EXPORT int onnxpar_mpi_initialized() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  return initialized;
}
ONNXPAR_MPI_EXPORT const char* onnxpar_mpi_file() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&MPI_Get_library_version), &info) == 0) return "";
  return info.dli_fname;
}

// Seconds that `repeats` plain calls of MPI_Allreduce (float32, sum, in place) on `count` elements
// take, without this library: what the benchmark compares sessions with.
ONNXPAR_MPI_EXPORT double onnxpar_mpi_time_all_reduce(const void* communicator, void* data,
                                                      size_t count, int repeats) {
  const MPI_Comm comm = *static_cast<const MPI_Comm*>(communicator);
  const double begin = MPI_Wtime();
  for (int i = 0; i < repeats; ++i) {
    MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(count), MPI_FLOAT, MPI_SUM, comm);
  }
  return MPI_Wtime() - begin;
}
