// The transport for ranks that are processes of an MPI job.
//
// Every group has its own communicators, one per lane, made by its members alone
// (MPI_Comm_create_group) at the first use. Members on one machine share memory (transport/shared.h), if
// they can. Members of a group on several machines send messages (transport/messages.h), or both, if
// each machine has equally many of them (transport/nested.h).
//
// MPI is initialised with MPI_THREAD_MULTIPLE: each thread of a rank that waits for messages drives MPI
// itself. These are the thread of the session, the thread that carries out what was started in the
// background, and those that receive from other stages. A thread's call also advances the messages of
// the others. If MPI allows one thread only, nothing runs in the background (`concurrent`).
//
// An error that MPI reports ends the job, because it is unknown what the other ranks have received.
//
// Counts are 32-bit in Open MPI 5.0. A message beyond 1 GiB uses a datatype that covers it.
#include <dlfcn.h>
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "transport/messages.h"
#include "transport/mpi_entry.h"
#include "transport/mpi_memory.h"
#include "transport/mpi_support.h"
#include "transport/nested.h"
#include "transport/parcels.h"
#include "transport/shared.h"

namespace onnxpar {
namespace {

// How long the foreground looks for messages without a pause, if it has a core of its own.
constexpr std::chrono::microseconds kBusy{20};
// The same for a message from a rank of its machine; it soon gives up the core between two looks.
constexpr std::chrono::milliseconds kNear{1};
constexpr std::chrono::seconds kPatience{5};  // for messages that are not received, at the end

struct MpiGroup : Group {
  MPI_Comm comm = MPI_COMM_NULL;
  // The members on this machine: all of them, or those of `nested`.
  MPI_Comm near_comm = MPI_COMM_NULL;
  std::unique_ptr<SharedFile> memory;
  std::unique_ptr<SharedGroup> shared;
  // If the members are on several machines, or cannot share memory: all of them.
  std::unique_ptr<MessageGroup> messages;
  // If the members are on several machines with shared memory, equally many on each: those at this
  // position of each machine.
  MPI_Comm far_comm = MPI_COMM_NULL;
  std::unique_ptr<MessageGroup> far;
  std::unique_ptr<NestedGroup> nested;

  // Calls f with what connects the members.
  template <class F>
  void connected(F&& f) const {
    if (nested) {
      f(*nested);
    } else if (messages) {
      f(*messages);
    } else {
      f(*shared);
    }
  }
  // The ranks for which this one waits.
  std::vector<int> missing() const {
    std::vector<int> indices;
    connected([&](const auto& members) { indices = members.missing(); });
    return ranks_at(ranks, indices);
  }
};

// A message that was sent without waiting, kept until MPI has taken it.
struct Outgoing {
  std::vector<std::byte> data;
  std::vector<MPI_Request> requests;
};

// Is sent before a message, so that a wrong size is an error and not a truncated tensor. The data of a
// parcel does not follow.
struct Header {
  uint64_t bytes = 0;
  Parcel parcel = kNoParcel;
};

// Waits until all ranks of a world have come to MPI_Finalize. MPI calls it there: it is the function that
// deletes an attribute of MPI_COMM_SELF.
//
// MPICH takes messages, says that they are sent, and sends them in later calls. Its MPI_Finalize waits for
// the other processes without sending them (5.0.2 with UCX), and a rank that still needs one waits forever.
int finish_together(MPI_Comm, int, void* world, void*) {
  MPI_Request request = MPI_REQUEST_NULL;
  int all = MPI_Ibarrier(*static_cast<MPI_Comm*>(world), &request) == MPI_SUCCESS ? 0 : 1;
  Patience patience(Clock::duration::zero());
  while (all == 0 && MPI_Test(&request, &all, MPI_STATUS_IGNORE) == MPI_SUCCESS) patience.pause();
  return MPI_SUCCESS;
}

class MpiTransport : public Transport {
 public:
  MpiTransport(MPI_Comm comm, const TransportOptions& options) : options_(options) {
    check(MPI_Comm_dup(comm, &world_), "MPI_Comm_dup");
    check(MPI_Comm_set_errhandler(world_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    int key = MPI_KEYVAL_INVALID;
    check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, finish_together, &key, nullptr),
          "MPI_Comm_create_keyval");
    check(MPI_Comm_set_attr(MPI_COMM_SELF, key, &world_), "MPI_Comm_set_attr");
    MPI_Comm_free_keyval(&key);  // when the attribute is gone
    check(MPI_Comm_rank(world_, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(world_, &size_), "MPI_Comm_size");
    int level = MPI_THREAD_SINGLE;
    check(MPI_Query_thread(&level), "MPI_Query_thread");
    concurrent_ = level == MPI_THREAD_MULTIPLE;
    const Processes processes = processes_of(world_);
    machine_of_ = processes.machine_of;
    // If ranks share cores, a waiting rank must not keep another from working.
    if (processes.crowded) looks_ = 0;
    pretend_machines();
    share_with_neighbours();
    watchdog_ = std::make_unique<Watchdog>(rank_, options_, world_, concurrent_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool concurrent() const override { return concurrent_; }
  bool prompt(int peer) const override {
    return parcels_from_.count(peer) != 0;
  }

  Group& group(const std::vector<int>& ranks, Lane lane) override {
    auto& group = groups_[{lane, ranks}];
    if (group) return *group;
    const Call call("making the communicator");
    const Watchdog::Missing unknown = [] { return std::vector<int>(); };
    const Watchdog::Guard guard(*watchdog_, Lane::kMain, call, ranks, unknown);
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
      connect(*made);
      group = std::move(made);
    });
    return *group;
  }

  bool overlaps(const Group& group) const override {
    const bool messages = static_cast<const MpiGroup&>(group).messages != nullptr;
    return concurrent_ && messages && group.size() > 1;
  }

  void all_reduce(Group& group, const Call& call, const Blocks& blocks, DType type,
                  Reduction reduction, Stream) override {
    run(group, call, [&](auto& members) { members.all_reduce(call, blocks, type, reduction); });
  }

  void all_gather(Group& group, const Call& call, const Blocks& blocks, Stream) override {
    run(group, call, [&](auto& members) { members.all_gather(call, blocks); });
  }

  void reduce_scatter(Group& group, const Call& call, const Blocks& blocks, DType type,
                      Reduction reduction, Stream) override {
    run(group, call, [&](auto& members) { members.reduce_scatter(call, blocks, type, reduction); });
  }

  void all_to_all(Group& group, const Call& call, const void* in, void* out, size_t bytes,
                  Stream) override {
    run(group, call, [&](auto& members) { members.all_to_all(call, in, out, bytes); });
  }

  void broadcast(Group& group, const Call& call, const void* in, void* out, size_t bytes,
                 int root, Stream) override {
    run(group, call, [&](auto& members) { members.broadcast(call, in, out, bytes, root); });
  }

  void permute(Group& group, const Call& call, const void* in, void* out, size_t bytes,
               const std::vector<Pair>& pairs, Stream) override {
    run(group, call, [&](auto& members) { members.permute(call, in, out, bytes, pairs); });
  }

  void send(const Call& call, int peer, int tag, const void* in, size_t bytes, Stream) override {
    named(describe(rank_, call, {rank_, peer}), [&] {
      std::lock_guard lock(outgoing_mutex_);
      reap();
      Outgoing& message = outgoing_.emplace_back();
      Header header{bytes};
      if (prompt(peer)) header.parcel = parcels_->put(in, bytes);
      const bool separate = header.parcel == kNoParcel;
      const size_t follows = separate ? bytes : 0;
      const std::byte* head = reinterpret_cast<const std::byte*>(&header);
      const std::byte* data = static_cast<const std::byte*>(in);
      message.data.reserve(sizeof(header) + follows);
      message.data.assign(head, head + sizeof(header));
      message.data.insert(message.data.end(), data, data + follows);
      const auto post = [&](size_t begin, size_t length) {
        const Bytes block(length);
        check(MPI_Isend(message.data.data() + begin, block.count(), block.type(), peer, tag,
                        world_, &message.requests.emplace_back()),
              "MPI_Isend");
      };
      post(0, sizeof(header));
      if (separate) post(sizeof(header), bytes);
    });
  }

  void recv(const Call& call, int peer, int tag, void* out, size_t bytes, Lane lane,
            Stream) override {
    const std::vector<int> ranks{peer, rank_};
    named(describe(rank_, call, ranks), [&] {
      std::optional<Watchdog::Guard> guard;
      const Watchdog::Missing sender = [peer] { return std::vector<int>{peer}; };
      if (lane == Lane::kMain) guard.emplace(*watchdog_, lane, call, ranks, sender);
      Header header{};
      await(&header, Bytes(sizeof(header)), peer, tag, lane, call);
      call.met();
      if (header.bytes != bytes) {
        throw std::runtime_error("expected " + std::to_string(bytes) + " bytes, got " +
                                 std::to_string(header.bytes));
      }
      if (header.parcel == kNoParcel) {
        await(out, Bytes(bytes), peer, tag, lane, call);
      } else {
        take_parcel(*parcels_from_.at(peer), header.parcel, out, bytes);
      }
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
    const auto pending = [&] {
      reap();
      return !outgoing_.empty() || (parcels_ && !parcels_->empty());
    };
    Patience patience(Clock::duration::zero());
    while (pending() && Clock::now() < end) patience.pause();
    for (auto& entry : groups_) {
      MpiGroup& group = *entry.second;
      for (MPI_Comm* made : {&group.near_comm, &group.far_comm, &group.comm}) {
        if (*made != MPI_COMM_NULL) MPI_Comm_free(made);
      }
    }
    groups_.clear();
    parcels_.reset();
    parcels_from_.clear();
    // `finish_together` needs the world's communicator.
  }

 private:
  [[noreturn]] void end_job(const std::string& message) {
    std::fprintf(stderr, "r%d | %s\n", rank_, message.c_str());
    std::fflush(stderr);
    if (options_.failing) options_.failing(message);
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

  // For tests: as if each ONNXPAR_RANKS_PER_MACHINE ranks had a machine of their own.
  void pretend_machines() {
    const char* text = std::getenv("ONNXPAR_RANKS_PER_MACHINE");
    const int ranks = text == nullptr ? 0 : std::atoi(text);
    if (!all_hold(ranks > 0, world_)) return;
    for (int r = 0; r < size_; ++r) machine_of_[static_cast<size_t>(r)] = r / ranks;
  }

  // Gives each rank of this machine memory for what it sends, if each can map that of all others.
  void share_with_neighbours() {
    const int machine = machine_of_[static_cast<size_t>(rank_)];
    MPI_Comm near = MPI_COMM_NULL;
    check(MPI_Comm_split(world_, machine, rank_, &near), "MPI_Comm_split");
    std::map<int, std::unique_ptr<SharedFile>> files;  // by rank
    int owner = 0;
    for (int r = 0; r < size_; ++r) {
      if (machine_of_[static_cast<size_t>(r)] != machine) continue;
      files[r] = share_memory(near, owner++, ParcelSender::kBytes);
      if (!files[r]) break;
    }
    check(MPI_Comm_free(&near), "MPI_Comm_free");
    if (std::any_of(files.begin(), files.end(), [](auto& each) { return !each.second; })) return;
    parcels_.emplace(std::move(files.at(rank_)));
    files.erase(rank_);
    parcels_from_ = std::move(files);
  }

  // Gives the group shared memory, messages, or both.
  void connect(MpiGroup& group) {
    const Machines machines(group.ranks, machine_of_);
    if (machines.count() == 1 && group.size() > 1) share(group, group.comm);
    if (group.shared) return;
    group.messages = std::make_unique<MessageGroup>(group.comm, busy(group.lane));
    if (!machines.nested()) return;
    const int machine = machines.machine(group.index);
    const int position = machines.position(group.index);
    check(MPI_Comm_split(group.comm, machine, group.index, &group.near_comm), "MPI_Comm_split");
    check(MPI_Comm_split(group.comm, position, machine, &group.far_comm), "MPI_Comm_split");
    share(group, group.near_comm);
    if (!all_hold(group.shared != nullptr, group.comm)) return;
    group.far = std::make_unique<MessageGroup>(group.far_comm, busy(group.lane));
    group.nested = std::make_unique<NestedGroup>(machines, group.index, *group.shared, *group.far,
                                                 *group.messages);
  }

  // Gives the members of the communicator, all on this machine, shared memory, if possible.
  void share(MpiGroup& group, MPI_Comm comm) {
    int index = 0;
    int size = 0;
    check(MPI_Comm_rank(comm, &index), "MPI_Comm_rank");
    check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
    group.memory = share_memory(comm, 0, SharedGroup::bytes(size));
    if (!group.memory) return;
    // Pending messages may need this rank's progress, and another member may wait for them first. If
    // the other members wait for messages, this one leaves them the processor.
    const bool sleeps = group.messages != nullptr;
    const auto idle = [comm = world_, sleeps,
                       patience = Patience(Clock::duration::zero())](uint64_t calls) mutable {
      int found = 0;
      MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm, &found, MPI_STATUS_IGNORE);
      if (!sleeps) {
        std::this_thread::yield();
        return;
      }
      if (calls == 0) patience.renew();
      patience.pause();
    };
    group.shared = std::make_unique<SharedGroup>(group.memory->data(), index, size, looks_, idle);
  }

  // How long a thread may keep a core busy while it waits for messages. In the background it may not:
  // the foreground computes.
  Clock::duration busy(Lane lane) const {
    return lane == Lane::kMain && looks_ != 0 ? kBusy : Clock::duration::zero();
  }

  // Calls f with what connects the members of the group.
  template <class F>
  void run(Group& base, const Call& call, F&& f) {
    MpiGroup& group = static_cast<MpiGroup&>(base);
    const Watchdog::Missing missing = [&group] { return group.missing(); };
    const Watchdog::Guard guard(*watchdog_, group.lane, call, group.ranks, missing);
    try {
      group.connected(f);
    } catch (const Conflict& e) {
      const std::string rank = std::to_string(group.ranks[static_cast<size_t>(e.member)]);
      throw std::runtime_error(describe(rank_, Call(call.where), group.ranks) +
                               ": disagrees with rank " + rank + ": got " +
                               differing(call.text(), e.what()) + ", where rank " + rank +
                               " calls " + differing(e.what(), call.text()));
    } catch (const MpiError& e) {
      end_job(describe(rank_, call, group.ranks) + ": " + e.what());
    } catch (const std::exception& e) {
      throw std::runtime_error(describe(rank_, call, group.ranks) + ": " + e.what());
    }
  }

  // Receives without keeping a core busy: MPI's own waiting would poll without a pause. Polling also
  // advances the messages that this rank sends, while its foreground computes.
  void await(void* out, const Bytes& block, int peer, int tag, Lane lane, const Call& call) {
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Irecv(out, block.count(), block.type(), peer, tag, world_, &request), "MPI_Irecv");
    // A neighbour's message comes at once, so sleeping would take longer than the message.
    const bool waits = lane == Lane::kMain && looks_ != 0 && prompt(peer);
    Patience patience(waits ? kNear : busy(lane));
    while (true) {
      int here = 0;
      check(MPI_Test(&request, &here, MPI_STATUS_IGNORE), "MPI_Test");
      if (here != 0) return;
      const Clock::duration stopped = stopped_;
      if (lane == Lane::kAsync && stopped.count() != 0 &&
          Clock::now().time_since_epoch() > stopped + kPatience) {
        check(MPI_Cancel(&request), "MPI_Cancel");
        check(MPI_Wait(&request, MPI_STATUS_IGNORE), "MPI_Wait");
        throw std::runtime_error(std::string(call.where) + ": the world was closed");
      }
      patience.pause();
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
  std::vector<int> machine_of_;  // by rank
  int looks_ = 2000;  // about 30 microseconds
  std::unique_ptr<Watchdog> watchdog_;
  std::map<std::pair<Lane, std::vector<int>>, std::unique_ptr<MpiGroup>> groups_;
  std::atomic<Clock::duration> stopped_{Clock::duration::zero()};
  std::mutex outgoing_mutex_;
  std::list<Outgoing> outgoing_;
  // If data of messages on this machine goes through shared memory.
  std::optional<ParcelSender> parcels_;
  std::map<int, std::unique_ptr<SharedFile>> parcels_from_;  // by sender
};

}  // namespace
}  // namespace onnxpar

#define ONNXPAR_MPI_EXPORT extern "C" __attribute__((visibility("default")))

ONNXPAR_MPI_EXPORT onnxpar::Transport* onnxpar_mpi_transport(
    const void* communicator, const onnxpar::TransportOptions& options) {
  return new onnxpar::MpiTransport(*static_cast<const MPI_Comm*>(communicator), options);
}

ONNXPAR_MPI_EXPORT bool onnxpar_mpi_guard(void (*action)(void*), void* data, std::string& message) {
  try {
    action(data);
    return true;
  } catch (const std::exception& e) {
    message = e.what();
    return false;
  }
}

ONNXPAR_MPI_EXPORT void onnxpar_mpi_begin(onnxpar::MpiWorld* found) {
  using onnxpar::check;
  static MPI_Comm world = MPI_COMM_WORLD;
  static bool ours = false;
  static std::atomic<int> worlds = 0;
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (finalized != 0) throw std::runtime_error("MPI has been finalised already");
  if (initialized == 0) {
    int level = MPI_THREAD_SINGLE;
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    ours = true;
  }
  found->communicator = &world;
  found->end = [] {
    int done = 0;
    MPI_Finalized(&done);
    if (--worlds == 0 && ours && done == 0) MPI_Finalize();
  };
  ++worlds;
  check(MPI_Comm_rank(world, &found->rank), "MPI_Comm_rank");
  check(MPI_Comm_size(world, &found->size), "MPI_Comm_size");
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
