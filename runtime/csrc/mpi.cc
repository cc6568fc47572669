// The transport for ranks that are processes of an MPI job.
//
// Every group has communicators of its own, one per lane, made by its members alone
// (MPI_Comm_create_group) at the first use. Reductions of float32 and float64 sums use MPI's own
// operation; all others ours (dtype.h), which Open MPI either lacks (16-bit floats) or does not
// define for NaN and signed zero. All are commutative, so that the algorithms of Open MPI, which
// give every rank the same tree or a copy of one result, agree to the bit.
//
// Counts are 32-bit in Open MPI 5.0. Reductions go in pieces anyway: Open MPI's temporaries for one
// large call cost more than the data. Movement beyond 1 GiB per block uses a datatype that covers
// the block.
#include <dlfcn.h>
#include <mpi.h>

#include <cstring>
#include <list>
#include <memory>

#include "mpi_entry.h"
#include "mpi_support.h"

namespace onnxpar {
namespace {

constexpr size_t kPieceBytes = size_t{4} << 20;  // of a reduction
constexpr size_t kSignatureBytes = 512;

struct MpiGroup : Group {
  MPI_Comm comm = MPI_COMM_NULL;
};

// A message that was sent without waiting, kept until MPI has taken it.
struct Outgoing {
  std::vector<std::byte> data;
  std::vector<MPI_Request> requests;
};

// What goes ahead of a message, so that a wrong size is an error and not a truncated tensor.
struct Header {
  uint64_t bytes;
};

uint64_t hash(const std::string& text) {  // FNV-1a
  uint64_t h = 14695981039346656037u;
  for (char c : text) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return h;
}

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
    watchdog_ = std::make_unique<Watchdog>(rank_, options_.timeout_s, world_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool debug() const override { return options_.debug; }
  bool concurrent() const override { return concurrent_; }

  Group& group(const std::vector<int>& ranks, Lane lane) override {
    auto& group = groups_[{lane, ranks}];
    if (group) return *group;
    const Call call{"making the communicator", {}};
    const Watchdog::Guard guard(*watchdog_, Lane::kMain, call, ranks);
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
    group = std::move(made);
    return *group;
  }

  void all_reduce(Group& group, const Call& call, const void* in, void* out, size_t count,
                  DType type, Reduction reduction, Stream) override {
    run(group, call, [&](MPI_Comm comm) {
      const Operation operation = operations_.get(type, reduction);
      const size_t item = dtype_size(type);
      const size_t step = kPieceBytes / item;
      for (size_t begin = 0; begin < count; begin += step) {
        const int n = static_cast<int>(std::min(step, count - begin));
        const std::byte* from = static_cast<const std::byte*>(in) + begin * item;
        std::byte* to = static_cast<std::byte*>(out) + begin * item;
        check(MPI_Allreduce(in == out ? MPI_IN_PLACE : from, to, n, operation.type, operation.op,
                            comm),
              "MPI_Allreduce");
      }
    });
  }

  void all_gather(Group& group, const Call& call, const void* in, void* out, size_t bytes,
                  Stream) override {
    run(group, call, [&](MPI_Comm comm) {
      const Bytes block(bytes);
      check(MPI_Allgather(in, block.count(), block.type(), out, block.count(), block.type(),
                          comm),
            "MPI_Allgather");
    });
  }

  void reduce_scatter(Group& group, const Call& call, const void* in, void* out, size_t count,
                      DType type, Reduction reduction, Stream) override {
    run(group, call, [&](MPI_Comm comm) {
      const Operation operation = operations_.get(type, reduction);
      const size_t item = dtype_size(type);
      const size_t members = group.ranks.size();
      const size_t step = std::max<size_t>(1, kPieceBytes / item / members);
      const std::byte* from = static_cast<const std::byte*>(in);
      if (count <= step) {
        check(MPI_Reduce_scatter_block(from, out, static_cast<int>(count), operation.type,
                                       operation.op, comm),
              "MPI_Reduce_scatter_block");
        return;
      }
      // A piece of every member's block, brought together.
      std::unique_ptr<std::byte[]> piece(new std::byte[members * step * item]);
      for (size_t begin = 0; begin < count; begin += step) {
        const size_t n = std::min(step, count - begin);
        for (size_t i = 0; i < members; ++i) {
          std::memcpy(piece.get() + i * n * item, from + (i * count + begin) * item, n * item);
        }
        check(MPI_Reduce_scatter_block(piece.get(),
                                       static_cast<std::byte*>(out) + begin * item,
                                       static_cast<int>(n), operation.type, operation.op, comm),
              "MPI_Reduce_scatter_block");
      }
    });
  }

  void all_to_all(Group& group, const Call& call, const void* in, void* out, size_t bytes,
                  Stream) override {
    run(group, call, [&](MPI_Comm comm) {
      const Bytes block(bytes);
      check(MPI_Alltoall(in, block.count(), block.type(), out, block.count(), block.type(), comm),
            "MPI_Alltoall");
    });
  }

  void broadcast(Group& group, const Call& call, const void* in, void* out, size_t bytes,
                 int root, Stream) override {
    run(group, call, [&](MPI_Comm comm) {
      if (group.index == root && in != out && bytes != 0) std::memcpy(out, in, bytes);
      const Bytes block(bytes);
      check(MPI_Bcast(out, block.count(), block.type(), root, comm), "MPI_Bcast");
    });
  }

  void permute(Group& group, const Call& call, const void* in, void* out, size_t bytes,
               const std::vector<Pair>& pairs, Stream) override {
    run(group, call, [&](MPI_Comm comm) {
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

  void recv(const Call& call, int peer, int tag, void* out, size_t bytes, Stream) override {
    const std::vector<int> ranks{peer, rank_};
    named(describe(rank_, call, ranks), [&] {
      const Watchdog::Guard guard(*watchdog_, Lane::kMain, call, ranks);
      Header header{};
      check(MPI_Recv(&header, sizeof(header), MPI_BYTE, peer, tag, world_, MPI_STATUS_IGNORE),
            "MPI_Recv");
      if (header.bytes != bytes) {
        throw std::runtime_error("expected " + std::to_string(bytes) + " bytes, got " +
                                 std::to_string(header.bytes));
      }
      const Bytes block(bytes);
      check(MPI_Recv(out, block.count(), block.type(), peer, tag, world_, MPI_STATUS_IGNORE),
            "MPI_Recv");
    });
  }

  void abort(const std::string& message) override {
    std::fprintf(stderr, "r%d | %s\n", rank_, message.c_str());
    std::fflush(stderr);
    MPI_Abort(world_, 1);
  }

  void close() override {
    watchdog_.reset();
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized != 0) return;  // MPI has freed all of it
    reap();
    for (auto& entry : groups_) MPI_Comm_free(&entry.second->comm);
    operations_.free();
    MPI_Comm_free(&world_);
  }

 private:
  template <class F>
  static void named(const std::string& who, F&& f) {
    try {
      f();
    } catch (const std::exception& e) {
      throw std::runtime_error(who + ": " + e.what());
    }
  }

  template <class F>
  void run(Group& group, const Call& call, F&& f) {
    const MPI_Comm comm = static_cast<MpiGroup&>(group).comm;
    const Watchdog::Guard guard(*watchdog_, group.lane, call, group.ranks);
    try {
      if (options_.debug) agree(group, call, comm);
      f(comm);
    } catch (const std::exception& e) {
      throw std::runtime_error(describe(rank_, call, group.ranks) + ": " + e.what());
    }
  }

  // Compares what the members call, before any data moves: 16 bytes where they agree, their texts
  // where they do not.
  void agree(const Group& group, const Call& call, MPI_Comm comm) {
    const std::string& detail = call.detail;
    const uint64_t h = hash(detail);
    uint64_t extremes[2] = {h, ~h};
    check(MPI_Allreduce(MPI_IN_PLACE, extremes, 2, MPI_UINT64_T, MPI_MAX, comm),
          "MPI_Allreduce");
    if (extremes[0] == ~extremes[1]) return;
    const std::string own = std::string(call.where) + " with " + detail;
    std::vector<char> text(kSignatureBytes, '\0');
    std::memcpy(text.data(), own.data(), std::min(own.size(), kSignatureBytes - 1));
    std::vector<char> all(kSignatureBytes * group.ranks.size());
    const int n = static_cast<int>(kSignatureBytes);
    check(MPI_Allgather(text.data(), n, MPI_CHAR, all.data(), n, MPI_CHAR, comm),
          "MPI_Allgather");
    for (size_t i = 0; i < group.ranks.size(); ++i) {
      const std::string other = &all[i * kSignatureBytes];
      if (other == text.data()) continue;
      throw std::runtime_error("disagrees with rank " + std::to_string(group.ranks[i]) +
                               ": got " + detail + ", where rank " +
                               std::to_string(group.ranks[i]) + " calls " + other);
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
  Operations operations_;
  std::unique_ptr<Watchdog> watchdog_;
  std::map<std::pair<Lane, std::vector<int>>, std::unique_ptr<MpiGroup>> groups_;
  std::list<Outgoing> outgoing_;
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
