// Minds the collectives that were handed to the GPU: whether they end in time, and what NCCL reports.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "abi/cuda_driver.h"
#include "abi/nccl_abi.h"
#include "transport/transport.h"

namespace onnxpar {

// A communicator. It ends once: destroyed by close, or aborted by the watch.
struct NcclComm {
  std::atomic<nccl::Comm> comm{nullptr};  // other threads use it than end it
  std::vector<int> ranks;  // global
};

// A thread of its own looks at the calls under way. What a rank enqueues on one queue (a lane, or a
// channel) is carried out in order, so the clock of a call runs from when it was enqueued and all
// before it on its queue had ended: the device may first have much else to do.
class NcclWatch {
 public:
  using Clock = std::chrono::steady_clock;
  // `report` hears the message of the first failure that the watch finds; it may end the process.
  NcclWatch(const nccl::Library& library, const cuda::Device& device, int rank, double timeout_s,
            std::function<void(const std::string&)> report);
  ~NcclWatch();

  void add(NcclComm& comm);
  // Ends what runs, and makes later calls fail, with this message; the first counts. Does not wait.
  void abort(const std::string& message);
  // Likewise, and reports it: for what fails where nobody waits who could tell.
  void fail(const std::string& message);
  bool aborted() const;
  // Throws std::runtime_error where all was aborted; `who` is the caller.
  void check_alive(const std::string& who) const;

  // Calls NCCL for one call on a communicator, and notes it on a queue as under way on the stream
  // until what f has enqueued is done. A call on a queue with a negative number may take for ever.
  // Throws std::runtime_error with NCCL's text.
  void submit(int queue, NcclComm& comm, const Call& call, cuda::Stream stream,
              const std::function<int()>& f);
  // Throws std::runtime_error where `result` is an error of NCCL's.
  void check(int result, const std::string& who, nccl::Comm comm) const;

  // Waits until `ready()`, which `wake` makes it ask again, or all was aborted: then it throws. So it
  // does after the limit of time, where there is one, which aborts all.
  void wait(const std::string& who, bool limited, const std::function<bool()>& ready);
  void wake();

  // Ends the thread and frees the communicators.
  void close();

 private:
  struct Entry {
    std::string who;
    std::unique_ptr<cuda::EventHandle> done;
    Clock::time_point since;
  };
  struct Queue {
    std::deque<Entry> entries;
    // The call that NCCL has not returned from yet, which it may when it connects ranks.
    std::string calling;
    Clock::time_point called;
  };

  void watch();
  void fail(std::unique_lock<std::mutex>& lock, const std::string& message);
  void end_communicators(std::unique_lock<std::mutex>& lock);
  // Those that have not ended; the caller ends them.
  std::vector<nccl::Comm> take_communicators();
  void reap(Queue& queue);
  std::string late(Clock::time_point now);

  const nccl::Library& library_;
  const cuda::Device& device_;
  const int rank_;
  const double timeout_s_;
  const std::function<void(const std::string&)> report_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::string abort_message_;
  std::vector<NcclComm*> comms_;
  std::map<int, Queue> queues_;
  std::vector<std::unique_ptr<cuda::EventHandle>> spare_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace onnxpar
