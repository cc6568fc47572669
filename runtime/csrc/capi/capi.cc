#include "capi/capi.h"


#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>

#include "abi/cuda_compiler.h"
#include "abi/live_bytes.h"
#include "abi/nccl_abi.h"
#include "abi/ort_io.h"
#include "capi/errors.h"
#include "capi/launcher.h"
#include "capi/ops.h"
#include "collective/device_rank.h"
#include "collective/world.h"
#include "kernels/device/queue.h"
#include "transport/mpi_entry.h"
#include "transport/nccl.h"
#include "transport/staged.h"

using namespace onnxpar;

namespace {

constexpr const char* kWorld = "a world";
thread_local std::string t_text;
thread_local std::vector<LoggedCall> t_calls;
thread_local RankContext* t_rank = nullptr;

World* add_rank(World* world, std::unique_ptr<Transport> transport,
                std::shared_ptr<CallLog> log = nullptr) {
  const int rank = transport->rank();
  world->size = transport->size();
  world->ranks[rank] = new RankContext(std::move(transport), std::move(log));
  return world;
}

World* mpi_world(const char* library, const void* communicator, int rank, int size, bool debug,
                 double timeout_s) {
  auto made = std::make_unique<World>();
  auto log = std::make_shared<CallLog>(rank, size);
  const auto failing = [log](const std::string& reason) { log->fail(reason); };
  auto transport = open_mpi(library, communicator, {debug, timeout_s, failing});
  return add_rank(made.release(), std::move(transport), std::move(log));
}

// Raises an error if MPI connects none of several processes: with a launcher of another MPI, each of
// them is a world of its own.
void check_connected(const MpiWorld& whole) {
  const Launched found = launched();
  if (whole.size > 1 || found.size <= 1) return;
  const bool open = whole.library.find("openmpi") != std::string::npos;
  const std::string cure =
      open ? "start it with its mpirun (or srun --mpi=pmix)" : "start it with its mpirun (or srun --mpi=pmi2)";
  throw std::runtime_error(
      found.launcher + " started " + std::to_string(found.size) +
      " processes, but MPI does not connect them: this program uses " + (open ? "Open MPI" : "MPICH") +
      ", so " + cure +
      (found.without_mpi ? "" : ", or name the library of the launcher's MPI in ONNXPAR_MPI_LIBRARY"));
}

World* whole_mpi_world(double timeout_s) {
  if (!(timeout_s >= 0)) {
    throw std::invalid_argument("timeout: expected seconds >= 0, got " + std::to_string(timeout_s));
  }
  const MpiWorld whole = begin_mpi();
  check_connected(whole);
  World* world = mpi_world(whole.library.c_str(), whole.communicator, whole.rank, whole.size, true,
                           timeout_s);
  world->end = whole.end;
  return world;
}

double default_timeout() {
  const char* text = std::getenv("ONNXPAR_TIMEOUT");
  if (text == nullptr || *text == '\0') return TransportOptions().timeout_s;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != '\0' || std::isnan(seconds)) {
    throw std::runtime_error(std::string("ONNXPAR_TIMEOUT: expected seconds, got ") + text);
  }
  return std::max(seconds, 0.0);
}

// The rank as which sessions act whose options are registered on this thread; null for none.
RankContext* acting_rank() {
  if (t_rank != nullptr) return t_rank;
  const char* wanted = std::getenv("ONNXPAR_WORLD");
  if (wanted == nullptr || *wanted == '\0') return nullptr;
  if (std::string(wanted) != "mpi") {
    throw std::runtime_error(std::string("ONNXPAR_WORLD: expected mpi, got ") + wanted);
  }
  static World* world = [] {
    static const double timeout = default_timeout();
    World* made = whole_mpi_world(timeout);
    // The host makes no call of this library, so the world ends with the process. A rank that fails
    // would wait here for others that wait for it.
    static World* kept = made;
    std::atexit([] {
      // 0 means without a limit.
      TimeLimit* limit = nullptr;
      if (timeout > 0) {
        limit = onnxpar_begin_limit(
            timeout, "onnxpar: MPI could not be finalised: another rank has not ended\n");
      }
      onnxpar_close(kept);
      onnxpar_end_limit(limit);
    });
    return made;
  }();
  return world->ranks.begin()->second;
}

// Throws std::invalid_argument: these are no ranks of the world.
std::vector<int> group_of(const World& world, const int* group, int members) {
  if (group == nullptr || members < 1) {
    throw std::invalid_argument("a group: expected one rank or more, got " +
                                (group == nullptr ? "null" : std::to_string(members)));
  }
  const std::vector<int> ranks(group, group + members);
  for (const int rank : ranks) {
    if (rank < 0 || rank >= world.size) {
      throw std::invalid_argument("a group: expected ranks from 0 to " +
                                  std::to_string(world.size - 1) + ", got " + std::to_string(rank));
    }
  }
  return ranks;
}

// The transport of tensors on the rank's GPU.
Transport& device_transport(RankContext& context) {
  DeviceRank* device = context.device();
  if (device == nullptr) {
    throw std::runtime_error("rank " + std::to_string(context.rank()) + ": it has no GPU");
  }
  return *device->transport;
}

// Messages outside a session, logged and counted, over the transport of the host or of the GPU.
void send(RankContext& context, Transport& transport, int peer, int tag, const void* in,
          size_t bytes, Stream stream, const char* what) {
  CallLog::Entry entry(context.calls(), CallKind::kSend, what, {context.rank(), peer}, Lane::kMain,
                       tag, static_cast<int64_t>(bytes));
  entry.on(stream);
  transport.send(Call(what), peer, tag, in, bytes, stream);
  context.count(Op::kSend, static_cast<int64_t>(bytes));
}

void receive(RankContext& context, Transport& transport, int peer, int tag, void* out, size_t bytes,
             Stream stream, bool background, const char* what) {
  const Lane lane = background ? Lane::kAsync : Lane::kMain;
  const Call call(what);
  CallLog::Entry entry(context.calls(), CallKind::kRecv, what, {peer, context.rank()}, lane, tag,
                       static_cast<int64_t>(bytes));
  entry.follow(call);
  entry.on(stream);
  if (background) entry.behind();
  transport.recv(call, peer, tag, out, bytes, lane, stream);
  context.count(Op::kRecv, 0);
}

// A collective that the program calls outside a session.
struct HostCall : Call {
  HostCall(const char* op, std::string text) : Call(op, hash(text)), what(std::move(text)) {}
  std::string detail() const override { return what; }
  const std::string what;
};

// The text at an address where it stays: logs find the names of calls by their addresses.
const char* kept(const char* text) {
  static std::mutex mutex;
  static std::set<std::string> all;
  std::lock_guard lock(mutex);
  return all.insert(text).first->c_str();
}

}  // namespace

const char* onnxpar_error() { return t_error.c_str(); }

World* onnxpar_threads(int size, int debug, double timeout_s) {
  World* world = nullptr;
  guarded([&] {
    if (size < 1) throw std::invalid_argument("a world has at least 1 rank");
    auto made = std::make_unique<World>();
    for (auto& transport : make_threads_transport(size, {debug != 0, timeout_s})) {
      add_rank(made.get(), std::move(transport));
    }
    world = made.release();
  });
  return world;
}

World* onnxpar_mpi(const char* library, const void* communicator, int rank, int size, int debug,
                   double timeout_s) {
  World* world = nullptr;
  guarded([&] { world = mpi_world(library, communicator, rank, size, debug != 0, timeout_s); });
  return world;
}

World* onnxpar_mpi_world(double timeout_s) {
  World* world = nullptr;
  guarded([&] { world = whole_mpi_world(timeout_s); });
  return world;
}

int onnxpar_nccl_version(const char* library) {
  int version = 0;
  guarded([&] { version = nccl::library(library).version; });
  return version;
}

int onnxpar_open_device(const World* world, int rank, int device, const char* library,
                        double timeout_s) {
  return guarded([&] {
    RankContext& context = given(world, kWorld).rank(rank);
    const std::string file = library == nullptr ? "" : library;
    DeviceRank* has = context.device();
    if (has != nullptr && has->device.index() == device && has->library == file) return;
    auto made = std::make_unique<DeviceRank>(device, file);
    made->transport =
        library == nullptr
            ? make_staged_transport(context.transport(), made->device)
            : make_nccl_transport(context.transport(), made->device, library, {true, timeout_s});
    context.open_device(std::move(made));
  });
}

int onnxpar_check_device(const World* world, int rank) {
  return guarded([&] {
    DeviceRank* device = given(world, kWorld).rank(rank).device();
    if (device != nullptr) device->transport->check_alive();
  });
}

int onnxpar_check_computed(void* stream) {
  return guarded([&] { cuda::check_faults(stream); });
}

int onnxpar_size(const World* world) {
  int size = -1;
  guarded([&] { size = given(world, kWorld).size; });
  return size;
}

int onnxpar_rank(const World* world) {
  int rank = -1;
  guarded([&] { rank = given(world, kWorld).ranks.begin()->first; });
  return rank;
}

int onnxpar_abort(const World* world, const char* message) {
  return guarded([&] {
    const std::string reason = text(message, "a message");
    for (const auto& entry : given(world, kWorld).ranks) entry.second->abort(reason);
  });
}

int onnxpar_close(const World* world) {
  return guarded([&] {
    for (const auto& entry : given(world, kWorld).ranks) entry.second->close();
    if (world->end != nullptr) world->end();
  });
}

int onnxpar_bind(const World* world, int rank) {
  return guarded([&] { t_rank = world == nullptr ? nullptr : &world->rank(rank); });
}

int onnxpar_add_dialect(const char* name) {
  return guarded([&] {
    const std::string wanted = name == nullptr ? "" : name;
    if (!wanted.empty() && wanted != "tensorrt" && wanted != "onnxruntime") {
      throw std::invalid_argument("dialect: expected tensorrt or onnxruntime, got " + wanted);
    }
    t_dialect = wanted;
  });
}

int onnxpar_ops() { return kOps; }
const char* onnxpar_op_name(int op) { return op_name(static_cast<Op>(op)); }

int onnxpar_counter(const World* world, int rank, int op, int64_t* calls, int64_t* bytes) {
  return guarded([&] {
    Counter& counter = given(world, kWorld).rank(rank).counter(static_cast<Op>(op));
    *calls = counter.calls;
    *bytes = counter.bytes;
  });
}

int onnxpar_reset_counters(const World* world, int rank) {
  return guarded([&] {
    for (int op = 0; op < kOps; ++op) {
      Counter& counter = given(world, kWorld).rank(rank).counter(static_cast<Op>(op));
      counter.calls = 0;
      counter.bytes = 0;
    }
  });
}

int onnxpar_all_reduce(const World* world, int rank, const int* group, int members,
                       const void* in, void* out, size_t count, int onnx_type, int reduction,
                       const char* what) {
  return guarded([&] {
    RankContext& context = given(world, kWorld).rank(rank);
    Transport& transport = context.transport();
    const DType type = dtype_from_onnx(onnx_type);
    if (reduction < 0 || reduction > static_cast<int>(Reduction::kProd)) {
      throw std::invalid_argument("a reduction: expected 0 to 3, got " + std::to_string(reduction));
    }
    if (count > 0 && (in == nullptr || out == nullptr)) {
      throw std::invalid_argument("expected memory to read and to write, got null");
    }
    Group& g = transport.group(group_of(*world, group, members), Lane::kMain);
    const HostCall call(what == nullptr ? "all_reduce of the program" : kept(what),
                        std::string("all_reduce ") + dtype_name(type) + " x " +
                            std::to_string(count) + " " +
                            reduction_name(static_cast<Reduction>(reduction)));
    CallLog::Entry entry(context.calls(), CallKind::kCollective, call.where, g, 1,
                         static_cast<int64_t>(count * dtype_size(type)));
    entry.follow(call);
    transport.all_reduce(g, call, Block(in, out, count), type, static_cast<Reduction>(reduction),
                         nullptr);
  });
}

int onnxpar_overlaps(const World* world, int rank, const int* group, int members) {
  int overlaps = -1;
  guarded([&] {
    Transport& transport = given(world, kWorld).rank(rank).transport();
    overlaps = transport.overlaps(transport.group(group_of(*world, group, members), Lane::kMain)) ? 1 : 0;
  });
  return overlaps;
}

int onnxpar_allow_background(const World* world, int rank, int allowed) {
  return guarded([&] { given(world, kWorld).rank(rank).allow_background(allowed != 0); });
}

int onnxpar_settle(const World* world, int rank) {
  return guarded([&] { given(world, kWorld).rank(rank).settle(); });
}

int onnxpar_keep_calls(const World* world, int rank, int keep) {
  return guarded([&] {
    RankContext& context = given(world, kWorld).rank(rank);
    std::shared_ptr<DeviceClock> clock;
    if (DeviceRank* device = context.device()) {
      device->device.make_current();
      if (keep != 0) clock = std::make_shared<DeviceClock>();
    }
    context.calls().keep(keep != 0, std::move(clock));
  });
}

int64_t onnxpar_take_calls(const World* world, int rank) {
  int64_t count = -1;
  guarded([&] {
    RankContext& context = given(world, kWorld).rank(rank);
    if (DeviceRank* device = context.device()) device->device.make_current();
    t_calls = context.calls().take();
    count = static_cast<int64_t>(t_calls.size());
  });
  return count;
}

int64_t onnxpar_foreground_ns(const World* world, int rank) {
  int64_t found = -1;
  guarded([&] { found = given(world, kWorld).rank(rank).calls().foreground_ns(); });
  return found;
}

int onnxpar_read_calls(void* rows) {
  static_assert(sizeof(LoggedCall) == 13 * sizeof(int64_t), "Python reads rows of integers");
  std::memcpy(rows, t_calls.data(), t_calls.size() * sizeof(LoggedCall));
  t_calls.clear();
  return 0;
}

const char* onnxpar_call_tables(const World* world, int rank) {
  const int failed =
      guarded([&] { t_text = given(world, kWorld).rank(rank).calls().tables(); });
  return failed == 0 ? t_text.c_str() : nullptr;
}

int onnxpar_calls_file(const World* world, int rank, const char* path) {
  return guarded([&] { given(world, kWorld).rank(rank).calls().set_file(path); });
}

int onnxpar_write_calls(const World* world, int rank, const char* reason, int fails) {
  return guarded([&] {
    CallLog& calls = given(world, kWorld).rank(rank).calls();
    fails != 0 ? calls.fail(reason) : calls.write(reason);
  });
}

LiveBytes* onnxpar_live_bytes() {
  LiveBytes* counter = nullptr;
  guarded([&] {
    if (api().create_env == nullptr) {
      throw std::runtime_error("the operators have not been registered with onnxruntime yet");
    }
    counter = new LiveBytes();
  });
  return counter;
}

int onnxpar_live_bytes_install(LiveBytes* counter) {
  return guarded([&] { counter->install(); });
}

int onnxpar_live_bytes_uninstall(LiveBytes* counter) {
  return guarded([&] { counter->uninstall(); });
}

int onnxpar_live_bytes_read(const LiveBytes* counter, int64_t* live, int64_t* peak) {
  *live = counter->live();
  *peak = counter->peak();
  return 0;
}

int onnxpar_live_bytes_reset(LiveBytes* counter) {
  counter->reset();
  return 0;
}

int onnxpar_live_bytes_count(LiveBytes* counter, const World* world, int rank) {
  return guarded([&] { given(world, kWorld).rank(rank).count_in(counter); });
}

int onnxpar_concurrent(const World* world, int rank) {
  int concurrent = -1;
  guarded([&] { concurrent = given(world, kWorld).rank(rank).transport().concurrent() ? 1 : 0; });
  return concurrent;
}

int onnxpar_prompt(const World* world, int rank, int peer) {
  int prompt = -1;
  guarded([&] {
    const Transport& transport = given(world, kWorld).rank(rank).transport();
    if (peer < 0 || peer >= transport.size()) {
      throw std::invalid_argument("peer: expected a rank below " +
                                  std::to_string(transport.size()) + ", got " +
                                  std::to_string(peer));
    }
    prompt = transport.prompt(peer) ? 1 : 0;
  });
  return prompt;
}

int onnxpar_send(const World* world, int rank, int peer, int tag, const void* in, size_t bytes,
                 const char* what) {
  return guarded([&] {
    RankContext& context = given(world, kWorld).rank(rank);
    send(context, context.transport(), peer, tag, in, bytes, nullptr, what);
  });
}

int onnxpar_recv(const World* world, int rank, int peer, int tag, void* out, size_t bytes,
                 int background, const char* what) {
  return guarded([&] {
    RankContext& context = given(world, kWorld).rank(rank);
    receive(context, context.transport(), peer, tag, out, bytes, nullptr, background != 0, what);
  });
}

int onnxpar_send_device(const World* world, int rank, int peer, int tag, const void* in,
                        size_t bytes, void* stream, const char* what) {
  return guarded([&] {
    RankContext& context = given(world, kWorld).rank(rank);
    send(context, device_transport(context), peer, tag, in, bytes, stream, what);
  });
}

int onnxpar_recv_device(const World* world, int rank, int peer, int tag, void* out, size_t bytes,
                        void* stream, int background, const char* what) {
  return guarded([&] {
    RankContext& context = given(world, kWorld).rank(rank);
    receive(context, device_transport(context), peer, tag, out, bytes, stream, background != 0,
            what);
  });
}

int onnxpar_compile_kernels(int capability) {
  return guarded([&] { cuda::compile_all(capability); });
}

// Called by onnxruntime.
ONNXPAR_EXPORT ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                              const ort::ApiBase* base) {
  const void* const* table = base->get_api(ort::kVersion);
  if (table == nullptr) {
    // Every onnxruntime has the first version of the table, which has what makes a status.
    return ort::make_status(base->get_api(1), ort::kFail,
                            "onnxruntime is too old for onnxpar's operators");
  }
  try {
    static const bool loaded = [&] {
      set_api(ort::Api::load(table));
      return true;
    }();
    (void)loaded;
    return register_ops(options, acting_rank(), t_dialect);
  } catch (const std::exception& e) {
    return ort::make_status(table, ort::kFail, e.what());
  }
}
