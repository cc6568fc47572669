// NCCL without GPUs: ranks are threads or processes, data moves through a file in memory that the
// ranks of a communicator share, named by its id. A call is work on its stream, which waits there for the
// other ranks: in the call where the stand-ins do all at once, else on the device. In the call it waits
// as NCCL does, the first time that ranks meet, to connect them (NCCL_RUNTIME_CONNECT).
//
// As strict as NCCL, and stricter: ranks of a communicator that call different collectives, of other
// sizes, types or roots, are an error, in a group too; so are communicators after their end, a send without
// its receive in the group, and device memory that is none. What is found on the device ncclCommGetAsyncError tells.
//
// Environment: STANDIN_NCCL_VERSION (23203), STANDIN_NCCL_FAIL=NAME:N (the N-th call of ncclNAME in
// this process fails), STANDIN_NCCL_ASYNC=N (from the N-th call on, communicators report a remote
// error), STANDIN_NCCL_KEPT=1 (a communicator's end never comes, as where a CUDA graph holds it),
// STANDIN_LOG (a line "nccl" a call, see `note`).
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "device.h"
#include "numbers.h"
#include "streams.h"

extern "C" int cudaGetDevice(int* device);

namespace {

constexpr int kSuccess = 0, kCudaError = 1, kSystemError = 2, kInternalError = 3, kInvalidArgument = 4,
              kInvalidUsage = 5, kRemoteError = 6;
constexpr int kMostRanks = 8;
constexpr size_t kSlot = size_t{1} << 16;

struct UniqueId {
  char data[128];
};

struct Config {  // as of 2.27, the least that is served
  size_t size;
  unsigned magic, version;
  int blocking, rest[5];
};

struct Step {  // what a rank is about to do
  char what[96];
  size_t bytes;
  double time;  // simulated, when it is ready
};
struct Box {  // one direction between two ranks
  std::atomic<uint64_t> written, read;  // pieces
  std::atomic<bool> ends[2];            // whether the sender and the receiver have come
  size_t total;
  unsigned char data[kSlot];
};
struct Shared {
  std::atomic<int> here, connecting;
  std::atomic<uint64_t> arrived;  // of all barriers so far
  Step steps[kMostRanks];
  unsigned char slots[kMostRanks][kSlot];
  Box boxes[kMostRanks][kMostRanks];
};

struct Comm {
  Shared* shared = nullptr;
  int rank = 0, size = 0, device = 0;
  uint64_t barriers = 0;
  bool connected = false;
  std::atomic<bool> aborted{false}, ended{false};
  std::string id;
  // Calls are carried out one after the other, on whatever streams.
  standin::PointRef chain;
  std::mutex busy;
  std::atomic<int> failed{kSuccess};
  std::string failure;  // what has; written before
};

thread_local std::string last_error;
thread_local int depth = 0;
struct Message {
  Comm* comm;
  bool sends;
  unsigned char* data;
  size_t bytes;
  int peer;
  void* stream;
};
thread_local std::vector<Message> grouped;
struct Collective {
  Comm* comm;
  void* stream;
  std::function<int(bool first)> work;
};
thread_local std::vector<Collective> grouped_collectives;

int error(int code, const std::string& text) {
  last_error = text;
  return code;
}

const char* setting(const char* name) {
  const char* text = getenv(name);
  return text != nullptr ? text : "";
}

std::atomic<long> calls{0};

// Counts a call, logs it, and fails it where the environment says so.
int note(const char* name, const Comm* comm, size_t count, const std::string& more = "") {
  static std::mutex mutex;
  static std::map<std::string, long> counts;
  standin_log("nccl", "%s\t%s\t%d/%d\t%zu\t%s", name, comm ? comm->id.c_str() : "",
              comm ? comm->rank : 0, comm ? comm->size : 0, count, more.c_str());
  std::lock_guard<std::mutex> lock(mutex);
  ++calls;
  if (std::string(name) + ":" + std::to_string(++counts[name]) == setting("STANDIN_NCCL_FAIL")) {
    return error(kSystemError, std::string(name) + " was told to fail");
  }
  return kSuccess;
}

void nap() {
  timespec const pause{0, 20000};
  nanosleep(&pause, nullptr);
}

// NCCL waits here for the CUDA graphs that hold calls of the communicator.
int end(const char* name, const Comm* comm) {
  int const result = note(name, comm, 0);
  while (*setting("STANDIN_NCCL_KEPT") != 0) nap();
  return result;
}

template <class Ready>
bool until(Comm& comm, Ready ready) {
  for (int look = 0; !ready(); ++look) {
    if (comm.aborted) return false;
    if (look > 200) nap();
  }
  return true;
}

bool barrier(Comm& comm) {
  uint64_t const wanted = ++comm.barriers * static_cast<uint64_t>(comm.size);
  ++comm.shared->arrived;
  return until(comm, [&] { return comm.shared->arrived >= wanted; });
}

int usable(Comm* comm) {
  if (comm == nullptr) return error(kInvalidArgument, "comm is null");
  if (comm->ended) return error(kInvalidUsage, "a communicator is used after its end");
  int device = 0;
  cudaGetDevice(&device);
  if (device != comm->device) {
    return error(kInvalidUsage, "device " + std::to_string(device) + " is current, not " +
                                    std::to_string(comm->device));
  }
  return kSuccess;
}

int on_device(const void* memory) {
  if (standin_is_device(memory)) return kSuccess;
  return error(kInvalidArgument, "memory is not the device's");
}

// Where memory is taken to connect ranks.
void take_memory() {
  if (*setting("STANDIN_ALLOCATION_WAITS") != 0) standin::wait_for_device();
}

int interrupted() { return error(kInternalError, "the communicator was aborted"); }

// Puts work on a stream. Its error is that of the call where it was done at once.
int submit(Comm* comm, void* stream, std::function<int()> work) {
  const auto outcome = std::make_shared<std::atomic<int>>(kSuccess);
  const auto guarded = [comm, work, outcome] {
    std::lock_guard<std::mutex> lock(comm->busy);
    const int result = comm->aborted ? interrupted() : work();
    *outcome = result;
    if (result == kSuccess || comm->aborted || comm->failed != kSuccess) return;
    comm->failure = last_error;
    comm->failed = result;
    standin_log("nccl", "failed\t%s\t%d/%d\t%d\t%s", comm->id.c_str(), comm->rank, comm->size, result,
                last_error.c_str());
  };
  const int queued = standin::enqueue(stream, guarded, &comm->chain);
  if (queued != kSuccess) return error(kCudaError, "error " + std::to_string(queued) + " of CUDA");
  return *outcome;
}

// A collective: ranks compare what they call; then every rank's `bytes` bytes travel in pieces, and
// take(rank, offset, data, n) sees them in the order of ranks.
// Lets a collective take its time on a stream, by ring algorithms; in a group, the first one starts it. One link serves all communicators
// of a process, one collective after the other.
constexpr double kLatency = 10000;  // nanoseconds
double link_time = 0;
void take_time(const Comm& comm, const std::string& what, size_t bytes, void* stream,
               bool first) {
  double begin = 0;
  for (int r = 0; r < comm.size; ++r) begin = std::max(begin, comm.shared->steps[r].time);
  double const others = comm.size - 1;
  double const share = what.rfind("AllGather", 0) == 0       ? others
                       : what.rfind("AllReduce", 0) == 0     ? 2 * others / comm.size
                       : what.rfind("ReduceScatter", 0) == 0 ? others / comm.size
                                                             : 1;
  double const taken = (first ? kLatency : 0) + share * static_cast<double>(bytes) / standin::rates().bytes;
  link_time = begin + taken;
  standin::communicate(stream, link_time, taken);
}

template <class Take>
int carry_out(Comm* comm, const std::string& what, const void* in, size_t bytes, void* stream,
              bool first, Take take) {
  Shared& s = *comm->shared;
  Step& own = s.steps[comm->rank];
  snprintf(own.what, sizeof own.what, "%s", what.c_str());
  own.bytes = bytes;
  own.time = std::max(standin::time_of(stream), link_time);
  if (!barrier(*comm)) return interrupted();
  for (int r = 0; r < comm->size; ++r) {
    if (what == s.steps[r].what && bytes == s.steps[r].bytes) continue;
    return error(kInvalidUsage, what + " of " + std::to_string(bytes) + " bytes meets " +
                                    s.steps[r].what + " of " + std::to_string(s.steps[r].bytes));
  }
  if (standin::rates().bytes != 0) take_time(*comm, what, bytes, stream, first);
  StandinAccess access;
  std::vector<unsigned char> copy(static_cast<const unsigned char*>(in),
                                  static_cast<const unsigned char*>(in) + bytes);
  for (size_t begin = 0; begin < bytes; begin += kSlot) {
    size_t const n = bytes - begin < kSlot ? bytes - begin : kSlot;
    memcpy(s.slots[comm->rank], copy.data() + begin, n);
    if (!barrier(*comm)) return interrupted();
    for (int r = 0; r < comm->size; ++r) take(r, begin, s.slots[r], n);
    if (!barrier(*comm)) return interrupted();
  }
  return barrier(*comm) ? kSuccess : interrupted();
}

template <class Take>
int meet(Comm* comm, const std::string& what, const void* in, size_t bytes, void* stream,
         Take take) {
  if (!comm->connected) {
    take_memory();
    ++comm->shared->connecting;
    if (!until(*comm, [&] { return comm->shared->connecting >= comm->size; })) return interrupted();
    comm->connected = true;
  }
  const auto work = [=](bool first) {
    return carry_out(comm, what, in, bytes, stream, first, take);
  };
  if (depth == 0) return submit(comm, stream, [=] { return work(true); });
  grouped_collectives.push_back({comm, stream, work});
  return kSuccess;
}

// A group of collectives: the kernel of one communicator on one stream.
int launch_collectives() {
  std::vector<Collective> all;
  all.swap(grouped_collectives);
  if (all.empty()) return kSuccess;
  for (const Collective& one : all) {
    if (one.comm == all[0].comm && one.stream == all[0].stream) continue;
    return error(kInvalidUsage, "groups are of one communicator and stream here");
  }
  return submit(all[0].comm, all[0].stream, [all] {
    for (const Collective& one : all) {
      if (int const result = one.work(&one == &all[0])) return result;
    }
    return kSuccess;
  });
}

Box& box_of(const Message& message) {
  Comm& comm = *message.comm;
  return message.sends ? comm.shared->boxes[comm.rank][message.peer]
                       : comm.shared->boxes[message.peer][comm.rank];
}

// All messages of a group, side by side.
int exchange(const std::vector<Message>& messages) {
  StandinAccess access;
  struct Under {
    Message message;
    size_t at = 0;
    bool over = false;
  };
  std::vector<Under> all;
  for (const Message& m : messages) all.push_back({m});
  size_t left = all.size();
  for (int look = 0; left != 0; ++look) {
    std::set<std::pair<Comm*, int>> busy;  // messages of one direction follow one another
    for (Under& u : all) {
      if (u.over) continue;
      Comm& comm = *u.message.comm;
      if (comm.aborted) return interrupted();
      if (!busy.insert({&comm, u.message.sends ? u.message.peer : ~u.message.peer}).second) continue;
      Box& box = box_of(u.message);
      size_t const n = u.message.bytes - u.at < kSlot ? u.message.bytes - u.at : kSlot;
      if (u.message.sends ? box.written != box.read : box.written == box.read) continue;
      if (u.message.sends) {
        box.total = u.message.bytes;
        memcpy(box.data, u.message.data + u.at, n);
        ++box.written;
      } else {
        if (box.total != u.message.bytes) {
          return error(kInvalidUsage, "a receive of " + std::to_string(u.message.bytes) +
                                          " bytes meets a send of " + std::to_string(box.total));
        }
        memcpy(u.message.data + u.at, box.data, n);
        ++box.read;
      }
      u.at += n;
      u.over = u.at == u.message.bytes;
      if (u.over) --left;
      look = 0;
    }
    if (look > 200) nap();
  }
  // A send is over when it was received.
  for (Under& u : all) {
    if (!u.message.sends) continue;
    Comm& comm = *u.message.comm;
    Box& box = box_of(u.message);
    if (!until(comm, [&] { return box.read == box.written; })) return interrupted();
  }
  return kSuccess;
}

// A group: the kernel of one communicator on one stream.
int launch(std::vector<Message> messages) {
  if (messages.empty()) return kSuccess;
  const Message& first = messages.front();
  for (const Message& m : messages) {
    if (m.comm == first.comm && m.stream == first.stream) continue;
    return error(kInvalidUsage, "groups are of one communicator and stream here");
  }
  bool connected = true;
  for (const Message& m : messages) {
    if (!box_of(m).ends[m.sends].exchange(true)) connected = false;
  }
  if (!connected) take_memory();
  for (const Message& m : messages) {
    if (!until(*m.comm, [&] { return box_of(m).ends[!m.sends].load(); })) return interrupted();
  }
  return submit(first.comm, first.stream, [messages] { return exchange(messages); });
}

int point(Comm* comm, bool sends, const void* data, size_t count, int type, int peer,
          void* stream) {
  if (int const result = usable(comm)) return result;
  if (int const result = note(sends ? "Send" : "Recv", comm, count, std::to_string(peer))) {
    return result;
  }
  if (int const result = on_device(data)) return result;
  if (peer < 0 || peer >= comm->size) return error(kInvalidArgument, "no such peer");
  if (size_of(type) == 0) return error(kInvalidArgument, "no such type");
  grouped.push_back({comm, sends, static_cast<unsigned char*>(const_cast<void*>(data)),
                     count * size_of(type), peer, stream});
  if (depth != 0) return kSuccess;
  std::vector<Message> messages;
  messages.swap(grouped);
  if (peer == comm->rank) return error(kInvalidUsage, "a message to oneself outside of a group");
  return launch(messages);
}

int checked(Comm* comm, const char* name, const void* in, const void* out, size_t count, int type,
            const std::string& more) {
  if (int const result = usable(comm)) return result;
  if (int const result = note(name, comm, count, more)) return result;
  if (size_of(type) == 0) return error(kInvalidArgument, "no such type");
  if (int const result = on_device(in)) return result;
  return on_device(out);
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  const char* text = setting("STANDIN_NCCL_VERSION");
  *version = *text != 0 ? atoi(text) : 23203;
  return kSuccess;
}

const char* ncclGetErrorString(int result) {
  static const char* const texts[] = {"no error",         "unhandled cuda error", "system error",
                                      "internal error",   "invalid argument",     "invalid usage",
                                      "remote process exited or there was a network error",
                                      "in progress"};
  return result >= 0 && result < 8 ? texts[result] : "unknown";
}
const char* ncclGetLastError(Comm* comm) {
  return comm != nullptr && comm->failed != kSuccess ? comm->failure.c_str() : last_error.c_str();
}

int ncclGetUniqueId(UniqueId* id) {
  if (int const result = note("GetUniqueId", nullptr, 0)) return result;
  static std::atomic<int> number{0};
  memset(id, 0, sizeof *id);
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  snprintf(id->data, sizeof id->data, "/standin-nccl-%d-%d-%ld", getpid(), ++number,
           static_cast<long>(now.tv_nsec));
  return kSuccess;
}

int ncclCommInitRankConfig(Comm** made, int size, UniqueId id, int rank, Config* config) {
  if (config == nullptr || config->magic != 0xcafebeef || config->size < 72 ||
      config->version < 22700 || config->blocking != 1) {
    return error(kInvalidArgument, "config");
  }
  if (size < 1 || size > kMostRanks || rank < 0 || rank >= size || id.data[0] != '/') {
    return error(kInvalidArgument, "size, rank or id");
  }
  Comm* comm = new Comm;
  comm->rank = rank;
  comm->size = size;
  comm->id = id.data;
  cudaGetDevice(&comm->device);
  if (int const result = note("CommInitRankConfig", comm, 0)) return result;
  int const file = shm_open(id.data, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) return error(kSystemError, "shared memory");
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return error(kSystemError, "shared memory");
  comm->shared = static_cast<Shared*>(memory);
  take_memory();
  ++comm->shared->here;
  until(*comm, [&] { return comm->shared->here == comm->size; });
  if (rank == 0) shm_unlink(id.data);
  *made = comm;
  return kSuccess;
}

int ncclCommInitRank(Comm** made, int size, UniqueId id, int rank) {
  Config config{72, 0xcafebeef, 22700, 1, {}};
  return ncclCommInitRankConfig(made, size, id, rank, &config);
}

// Memory is kept: calls of other threads may still look at it.
int ncclCommDestroy(Comm* comm) {
  if (int const result = usable(comm)) return result;
  comm->ended = true;
  standin::wait(comm->chain);
  return end("CommDestroy", comm);
}
int ncclCommAbort(Comm* comm) {
  if (comm->ended.exchange(true)) return error(kInvalidUsage, "a communicator ends twice");
  comm->aborted = true;
  standin::wait(comm->chain);
  return end("CommAbort", comm);
}
int ncclCommGetAsyncError(Comm* comm, int* result) {
  if (comm->ended) return error(kInvalidUsage, "a communicator is asked after its end");
  const char* text = setting("STANDIN_NCCL_ASYNC");
  *result = *text != 0 && calls >= atoi(text) ? kRemoteError : comm->failed.load();
  return kSuccess;
}

int ncclGroupStart(void) {
  ++depth;
  return note("GroupStart", nullptr, 0);
}
int ncclGroupEnd(void) {
  if (depth == 0) return error(kInvalidUsage, "no group");
  if (--depth != 0) return kSuccess;
  std::vector<Message> messages;
  messages.swap(grouped);
  size_t const calls_of_it = messages.size() + grouped_collectives.size();
  if (int const result = note("GroupEnd", nullptr, calls_of_it)) return result;
  if (int const result = launch_collectives()) return result;
  return launch(messages);
}
int ncclSend(const void* data, size_t count, int type, int peer, Comm* comm, void* stream) {
  return point(comm, true, data, count, type, peer, stream);
}
int ncclRecv(void* data, size_t count, int type, int peer, Comm* comm, void* stream) {
  return point(comm, false, data, count, type, peer, stream);
}

int ncclAllReduce(const void* in, void* out, size_t count, int type, int operation, Comm* comm,
                  void* stream) {
  std::string const what = "AllReduce " + std::to_string(type) + " " + std::to_string(operation);
  if (int const result = checked(comm, "AllReduce", in, out, count, type, what)) return result;
  return meet(comm, what, in, count * size_of(type), stream,
              [=](int r, size_t begin, const unsigned char* data, size_t n) {
                unsigned char* to = static_cast<unsigned char*>(out) + begin;
                if (r == 0) {
                  memcpy(to, data, n);
                } else {
                  reduce(to, data, n, type, operation);
                }
              });
}
int ncclReduceScatter(const void* in, void* out, size_t count, int type, int operation, Comm* comm,
                      void* stream) {
  std::string const what =
      "ReduceScatter " + std::to_string(type) + " " + std::to_string(operation);
  if (int const result = checked(comm, "ReduceScatter", in, out, count, type, what)) return result;
  size_t const block = count * size_of(type);
  size_t const first = block * static_cast<size_t>(comm->rank);
  return meet(comm, what, in, block * static_cast<size_t>(comm->size), stream,
              [=](int r, size_t begin, const unsigned char* data, size_t n) {
                size_t const from = std::max(begin, first);
                size_t const to = std::min(begin + n, first + block);
                if (from >= to) return;
                unsigned char* own = static_cast<unsigned char*>(out) + (from - first);
                if (r == 0) {
                  memcpy(own, data + (from - begin), to - from);
                } else {
                  reduce(own, data + (from - begin), to - from, type, operation);
                }
              });
}
int ncclAllGather(const void* in, void* out, size_t count, int type, Comm* comm, void* stream) {
  std::string const what = "AllGather " + std::to_string(type);
  if (int const result = checked(comm, "AllGather", in, out, count, type, what)) return result;
  size_t const block = count * size_of(type);
  return meet(comm, what, in, block, stream,
              [=](int r, size_t begin, const unsigned char* data, size_t n) {
                size_t const at = static_cast<size_t>(r) * block + begin;
                memcpy(static_cast<unsigned char*>(out) + at, data, n);
              });
}
int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, Comm* comm,
                  void* stream) {
  std::string const what = "Broadcast " + std::to_string(type) + " " + std::to_string(root);
  if (int const result = checked(comm, "Broadcast", in, out, count, type, what)) return result;
  if (root < 0 || root >= comm->size) return error(kInvalidArgument, "no such root");
  return meet(comm, what, in, count * size_of(type), stream,
              [=](int r, size_t begin, const unsigned char* data, size_t n) {
                if (r == root) memcpy(static_cast<unsigned char*>(out) + begin, data, n);
              });
}
}
