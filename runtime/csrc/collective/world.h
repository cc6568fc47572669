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

// A collective that runs in the background. The result is in `kept`, because the memory of the output
// of the node that waits is not known yet; or in the place of the operand.
struct Request {
  Collective collective;
  Group* group = nullptr;
  const void* in = nullptr;
  Shape input;
  DType type = DType::kFloat32;
  std::unique_ptr<std::byte[]> kept;
  void* result = nullptr;
  size_t result_bytes = 0;
  bool done = false;
  std::string error;

  // Gives it memory for a result of this size.
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

  // Queues the collective and returns its number. If two threads cannot use the transport at once, it
  // is carried out immediately.
  int64_t start(std::shared_ptr<Request> request);
  // Returns the finished request and forgets it. Throws its error.
  std::shared_ptr<Request> wait(int64_t number, const std::string& where);
  // Waits for the requests of `numbers` that still run, so that their inputs may be freed.
  void drain(const std::vector<int64_t>& numbers);

  // Starts a collective that a later run carries out on the same memory, which outlives both runs.
  void start_ahead(std::shared_ptr<Request> request);
  // Waits for what was started ahead on `in` and was not taken, and forgets it.
  void drop_ahead(const void* in);
  // The finished request for this collective on `in`, if start_ahead was called for it; else null. It
  // forgets the request. Throws its error.
  std::shared_ptr<Request> take_ahead(const Collective& collective, const void* in);

  void abort(const std::string& message);
  void close();

 private:
  void work();
  void run(Request& request, Memory& memory);
  std::runtime_error failure(const std::string& what) const;

  std::unique_ptr<Transport> transport_;
  const int rank_;
  const int size_;
  std::atomic<bool> closed_{false};
  HostMemory memory_;
  std::unique_ptr<DeviceRank> device_;
  Counter counters_[kOps];

  std::mutex mutex_;
  std::condition_variable queued_;
  std::condition_variable finished_;
  std::deque<std::shared_ptr<Request>> queue_;
  std::map<int64_t, std::shared_ptr<Request>> requests_;
  std::map<const void*, int64_t> ahead_;  // by the operand; only the rank's main thread uses it
  int64_t next_ = 1;
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
