// A set of ranks, and the data of each of its ranks in this process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "abi/live_bytes.h"
#include "collective/call_log.h"
#include "collective/collective.h"
#include "transport/transport.h"

namespace onnxpar {

// A collective that runs in the background. Results are where the nodes that wait expect them, or in
// `kept`, if the memory of their outputs is not known yet.
struct Request {
  Collective collective;
  Group* group = nullptr;
  std::vector<Operand> operands;
  DType type = DType::kFloat32;
  std::vector<CountedBytes> kept;  // empty, or the memory of a result, by operand
  bool later = false;  // finished by the next program, in the memory of a state
  bool done = false;
  std::string error;

  // Adds an operand whose result is at `out`.
  void add(const void* in, void* out, const Shape& input) {
    kept.emplace_back();
    operands.push_back({in, out, input});
  }
  // Adds an operand whose result has memory of its own.
  void add(const void* in, CountedBytes result, const Shape& input) {
    operands.push_back({in, result.get(), input});
    kept.push_back(std::move(result));
  }
  // The operand in this memory; the last if there is none.
  size_t find(const void* in) const {
    size_t i = 0;
    while (i + 1 < operands.size() && operands[i].in != in) ++i;
    return i;
  }
};

struct DeviceRank;

struct Counter {
  std::atomic<int64_t> calls{0};
  std::atomic<int64_t> bytes{0};
};

// One rank. Kernels hold a pointer to it, and it is not known when the last session of a library
// ends. So ranks are never freed, only closed (a few kilobytes each).
class RankContext {
 public:
  // Without a log, the rank makes its own.
  explicit RankContext(std::unique_ptr<Transport> transport, std::shared_ptr<CallLog> log = nullptr);
  ~RankContext();

  // Moves tensors in host memory. Throws std::runtime_error once closed.
  Transport& transport();
  int rank() const { return rank_; }
  int size() const { return size_; }
  // For calls on the host transport's main lane.
  Memory& memory() { return memory_; }

  CallLog& calls() { return *calls_; }

  // Counts memory of collectives in the background here; nowhere if it is null, as at first.
  void count_in(LiveBytes* counter) { live_bytes_ = counter; }
  // Memory in the host for what runs in the background.
  CountedBytes background_bytes(size_t bytes) { return {bytes, live_bytes_}; }

  // The rank's GPU; null before open_device. Throws std::runtime_error once closed.
  DeviceRank* device();
  // Throws std::invalid_argument if the rank already has a GPU.
  void open_device(std::unique_ptr<DeviceRank> device);

  void count(Op op, int64_t bytes) {
    Counter& counter = counters_[static_cast<int>(op)];
    counter.calls.fetch_add(1, std::memory_order_relaxed);
    counter.bytes.fetch_add(bytes, std::memory_order_relaxed);
  }
  Counter& counter(Op op) { return counters_[static_cast<int>(op)]; }

  // Queues the collective under keys: the addresses by which the nodes that wait find it, one for each
  // operand. If its data does not travel while the rank computes, or two threads cannot use the
  // transport at once, it is carried out now. One with the same key that nobody waited for belongs to a
  // run that failed: it is waited for and forgotten.
  void start(const std::vector<const void*>& keys, std::shared_ptr<Request> request);
  // Whether collectives may run in the background; if not, all are carried out when they start. True at
  // first.
  void allow_background(bool allowed) { background_ = allowed; }
  bool background_allowed() const { return background_; }
  // The finished request of a key; forgets it. Null if there is none. Throws its error.
  std::shared_ptr<Request> take(const void* key);
  // Keeps a collective that `start_held` starts, in the order of these numbers, with its keys.
  void hold(int64_t order, std::vector<const void*> keys, std::shared_ptr<Request> request);
  void start_held();
  // Forgets one that was not started, because its program failed before its end; or all of them.
  void drop_held(int64_t order) { held_.erase(order); }
  void drop_held() { held_.clear(); }
  // Waits for all collectives in the background. Throws the error of one that the next program would
  // finish; those of others are thrown where they are taken.
  void settle();
  // Waits for those in host memory. The other members start them too: none is behind a call that this
  // rank has not made.
  void finish_started() noexcept;
  // Waits for a request, if nobody has waited for it, and forgets it, so that its memory may be freed.
  void drop(const void* key, const std::weak_ptr<Request>& request);

  void abort(const std::string& message);
  void close();

 private:
  struct Held {
    std::vector<const void*> keys;
    std::shared_ptr<Request> request;
  };

  void work();
  void run(Request& request, Memory& memory);
  // Waits for the request of a key and forgets it; null if there is none.
  std::shared_ptr<Request> finished(const void* key);
  std::runtime_error failure(const std::string& what) const;

  std::unique_ptr<Transport> transport_;
  const int rank_;
  const int size_;
  const std::shared_ptr<CallLog> calls_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> background_{true};
  std::atomic<LiveBytes*> live_bytes_{nullptr};
  HostMemory memory_;
  std::unique_ptr<DeviceRank> device_;
  Counter counters_[kOps];
  std::map<int64_t, Held> held_;  // only the rank's own thread uses it

  std::mutex mutex_;
  std::condition_variable queued_;
  std::condition_variable finished_;
  std::deque<std::shared_ptr<Request>> queue_;
  std::map<const void*, std::shared_ptr<Request>> requests_;
  bool stop_ = false;
  std::thread worker_;
};

// The ranks of one world in this process, by global rank.
struct World {
  int size = 0;
  std::map<int, RankContext*> ranks;
  void (*end)() = nullptr;  // called when the ranks are closed

  RankContext& rank(int index) const;
};

}  // namespace onnxpar
