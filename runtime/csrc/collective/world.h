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

#include "collective/collective.h"
#include "transport/transport.h"

namespace onnxpar {

// A collective that runs in the background. Its result is where the node that waits expects it, or in
// `kept`, if the memory of that node's output is not known yet.
struct Request {
  Collective collective;
  Group* group = nullptr;
  const void* in = nullptr;
  void* result = nullptr;
  size_t result_bytes = 0;
  Shape input;
  DType type = DType::kFloat32;
  std::unique_ptr<std::byte[]> kept;
  bool done = false;
  std::string error;

  // Gives it memory of its own for a result of this size.
  void keep(size_t bytes) {
    kept.reset(new std::byte[bytes]);
    result = kept.get();
    result_bytes = bytes;
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
  explicit RankContext(std::unique_ptr<Transport> transport);
  ~RankContext();

  // Moves tensors in host memory. Throws std::runtime_error once closed.
  Transport& transport();
  int rank() const { return rank_; }
  int size() const { return size_; }
  // For calls on the host transport's main lane.
  Memory& memory() { return memory_; }

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

  // Queues the collective under a key: the address by which the node that waits finds it. If its data
  // does not travel while the rank computes, or two threads cannot use the transport at once, it is
  // carried out now. One with the same key that nobody waited for belongs to a run that failed: it is
  // waited for and forgotten.
  void start(const void* key, std::shared_ptr<Request> request);
  // Whether collectives may run in the background; if not, all are carried out when they start. True at
  // first.
  void allow_background(bool allowed) { background_ = allowed; }
  bool background_allowed() const { return background_; }
  // The finished request of a key; forgets it. Null if there is none. Throws its error.
  std::shared_ptr<Request> take(const void* key);
  // Waits for a request, if nobody has waited for it, and forgets it, so that its memory may be freed.
  void drop(const void* key, const std::weak_ptr<Request>& request);

  void abort(const std::string& message);
  void close();

 private:
  void work();
  void run(Request& request, Memory& memory);
  // Waits for the request of a key and forgets it; null if there is none.
  std::shared_ptr<Request> finished(const void* key);
  std::runtime_error failure(const std::string& what) const;

  std::unique_ptr<Transport> transport_;
  const int rank_;
  const int size_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> background_{true};
  HostMemory memory_;
  std::unique_ptr<DeviceRank> device_;
  Counter counters_[kOps];

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

  RankContext& rank(int index) const;
};

}  // namespace onnxpar
