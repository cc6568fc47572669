// Messages between two ranks by NCCL, with the meaning they have on every transport.
//
// NCCL's send waits, on the device, until the receiver takes the message, and its messages have no
// tags. Here a send copies into memory of the channel and returns. A channel is one direction between
// two ranks with one tag; it has a communicator of those two and a stream at either end, and nothing
// else is ever enqueued on these. So no message waits for anything but its own receiver, and none is
// taken for another, whatever order ranks send and receive in.
//
// Ahead of each message a header goes over the host's transport: its size, so that a wrong one is an
// error and not a hang, and in the first the id of the communicator. The other way goes word that the
// receiver asks for the next message. So neither side has a kernel on the device until the other one
// has, or is about to: CUDA does not promise that one stream goes on while a kernel of another waits,
// and some of its calls wait for all kernels.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "abi/cuda_memory.h"
#include "transport/nccl_watch.h"

namespace onnxpar {

// What goes over the host's transport ahead of a message.
struct NcclHeader {
  uint64_t bytes = 0;
  nccl::UniqueId id{};  // of the channel's communicator, in the first message
};

// Makes the communicator of `ranks`, in which this rank is number `index`; the other ranks do so too.
// With `given_up` there is no limit of time, and null is left where it says so once the watch was
// woken. Throws std::runtime_error where the ranks do not come in time, or NCCL fails.
void open_nccl(NcclWatch& watch, const nccl::Library& library, const cuda::Device& device,
               const std::string& who, const nccl::UniqueId& id, int index,
               const std::vector<int>& ranks, NcclComm& made,
               const std::function<bool()>& given_up = nullptr);

class NcclSender {
 public:
  // Returns once the receiver has asked for the next message. Throws std::runtime_error.
  using Asked = std::function<void(const Call&)>;
  NcclSender(NcclWatch& watch, const nccl::Library& library, const cuda::Device& device, int rank,
             int peer, int queue, const nccl::UniqueId& id, Asked asked);
  // Copies on the stream, and leaves the rest to a thread of the channel's own.
  void send(const Call& call, const void* in, size_t bytes, cuda::Stream stream);
  // Has the thread end. What no receiver asks for is not sent.
  void stop();
  // Waits for the thread's end.
  void close();

 private:
  struct Message {
    std::string where;
    cuda::Slab slab;
    const void* data = nullptr;
    size_t bytes = 0;
    cuda::EventHandle event;  // first that the copy is made, then that the message was taken
  };

  void work();
  void reap();
  std::unique_ptr<Message> message_of(size_t bytes, cuda::Stream stream);

  NcclWatch& watch_;
  const nccl::Library& library_;
  const cuda::Device& device_;
  const nccl::UniqueId id_;
  const int rank_;
  const int peer_;
  const int queue_;  // of the watch
  const Asked asked_;
  NcclComm comm_;
  cuda::StreamHandle stream_;

  std::mutex mutex_;
  std::condition_variable queued_;
  std::deque<std::unique_ptr<Message>> waiting_;
  std::atomic<bool> stop_{false};
  std::string error_;
  std::deque<std::unique_ptr<Message>> under_way_;
  std::multimap<size_t, std::unique_ptr<Message>> spare_;  // by the bytes they can have
  std::thread thread_;
};

class NcclReceiver {
 public:
  NcclReceiver(NcclWatch& watch, const nccl::Library& library, const cuda::Device& device, int rank,
               int peer, int queue);
  // Receives what a header has announced; it is complete on the stream.
  void recv(const Call& call, const NcclHeader& header, void* out, size_t bytes,
            cuda::Stream stream);

 private:
  NcclWatch& watch_;
  const nccl::Library& library_;
  const cuda::Device& device_;
  const int rank_;
  const int peer_;
  const int queue_;  // of the watch
  NcclComm comm_;
  cuda::StreamHandle stream_;
  cuda::EventHandle event_;
};

}  // namespace onnxpar
