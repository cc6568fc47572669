#include "transport/nccl_channel.h"

#include <stdexcept>

namespace onnxpar {
void open_nccl(NcclWatch& watch, const nccl::Library& library, const cuda::Device& device,
               const std::string& who, const nccl::UniqueId& id, int index,
               const std::vector<int>& ranks, NcclComm& made,
               const std::function<bool()>& given_up) {
  // NCCL waits in the call for all ranks, and what does not exist yet cannot be aborted; so a thread
  // makes it that may be left behind.
  struct Opening {
    std::atomic<bool> done{false};
    int result = nccl::kSuccess;
    std::string error;
    nccl::Comm comm = nullptr;
  };
  const auto opening = std::make_shared<Opening>();
  std::thread([opening, &watch, &library, &device, id, index, size = static_cast<int>(ranks.size())] {
    try {
      device.adopt_thread();
      // A communicator that does not block would start a thread for every call.
      nccl::Config config;
      opening->result = library.comm_init(&opening->comm, size, id, index, &config);
    } catch (const std::exception& e) {
      opening->error = e.what();
    }
    opening->done = true;
    watch.wake();
  }).detach();
  watch.wait(who, !given_up, [&] { return opening->done || (given_up && given_up()); });
  if (!opening->done) return;
  if (!opening->error.empty()) throw std::runtime_error(who + ": " + opening->error);
  watch.check(opening->result, who, nullptr);
  made.ranks = ranks;
  made.comm = opening->comm;
  watch.add(made);
}

NcclSender::NcclSender(NcclWatch& watch, const nccl::Library& library, const cuda::Device& device,
                       int rank, int peer, int queue, const nccl::UniqueId& id, Asked asked)
    : watch_(watch),
      library_(library),
      device_(device),
      id_(id),
      rank_(rank),
      peer_(peer),
      queue_(queue),
      asked_(std::move(asked)) {
  thread_ = std::thread([this] { work(); });
}

void NcclSender::stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    queued_.notify_all();
  }
  watch_.wake();
}

void NcclSender::close() {
  if (thread_.joinable()) thread_.join();
}

void NcclSender::send(const Call& call, const void* in, size_t bytes, cuda::Stream stream) {
  std::unique_ptr<Message> message = message_of(bytes, stream);
  message->where = call.where;
  message->bytes = bytes;
  std::byte* data = message->slab.get(bytes, stream);
  message->data = data;
  cuda::copy(data, in, bytes, stream);
  message->event.record(stream);
  std::lock_guard lock(mutex_);
  waiting_.push_back(std::move(message));
  queued_.notify_all();
}

// A message with memory for so many bytes. Memory is never given back, since that waits for all that
// the device does, messages that no receiver has asked for yet among it. It comes in powers of two, so
// that what is kept is bounded where sizes change.
std::unique_ptr<NcclSender::Message> NcclSender::message_of(size_t bytes, cuda::Stream stream) {
  {
    std::lock_guard lock(mutex_);
    if (!error_.empty()) throw std::runtime_error(error_);
    reap();
    const auto found = spare_.lower_bound(bytes);
    if (found != spare_.end()) {
      std::unique_ptr<Message> message = std::move(found->second);
      spare_.erase(found);
      return message;
    }
  }
  auto made = std::make_unique<Message>();
  size_t rounded = 1;
  while (rounded < bytes) rounded *= 2;
  made->slab.get(rounded, stream);
  return made;
}

// Keeps the memory of messages that were taken.
void NcclSender::reap() {
  while (!under_way_.empty() && under_way_.front()->event.done()) {
    const size_t size = under_way_.front()->slab.size();
    spare_.emplace(size, std::move(under_way_.front()));
    under_way_.pop_front();
  }
}

void NcclSender::work() {
  try {
    device_.adopt_thread();
    while (true) {
      std::unique_lock lock(mutex_);
      queued_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      std::unique_ptr<Message> message = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      const Call call(message->where);
      const std::vector<int> ranks{rank_, peer_};
      const std::string who = describe(rank_, call, ranks);
      asked_(call);
      watch_.check_alive(who);
      if (comm_.comm == nullptr) {
        // The receiver may come when it likes.
        open_nccl(watch_, library_, device_, who, id_, 0, ranks, comm_, [&] { return stop_.load(); });
        if (comm_.comm == nullptr) return;
      }
      message->event.hold(stream_.get());
      if (message->bytes != 0) {
        watch_.submit(queue_, comm_, call, stream_.get(), [&] {
          return library_.send(message->data, message->bytes, nccl::kUint8, 1, comm_.comm,
                               stream_.get());
        });
      }
      message->event.record(stream_.get());
      lock.lock();
      under_way_.push_back(std::move(message));
    }
  } catch (const std::exception& e) {
    {
      std::lock_guard lock(mutex_);
      error_ = e.what();
    }
    // There may be no next message that could tell, and the receiver waits.
    if (!stop_) watch_.fail(e.what());
  }
}

NcclReceiver::NcclReceiver(NcclWatch& watch, const nccl::Library& library,
                           const cuda::Device& device, int rank, int peer, int queue)
    : watch_(watch), library_(library), device_(device), rank_(rank), peer_(peer), queue_(queue) {}

void NcclReceiver::recv(const Call& call, const NcclHeader& header, void* out, size_t bytes,
                        cuda::Stream stream) {
  const std::vector<int> ranks{peer_, rank_};
  const std::string who = describe(rank_, call, ranks);
  watch_.check_alive(who);
  if (comm_.comm == nullptr) {
    open_nccl(watch_, library_, device_, who, header.id, 1, ranks, comm_);
  }
  // What the stream still does with the memory comes first.
  event_.record(stream);
  event_.hold(stream_.get());
  if (bytes != 0) {
    watch_.submit(queue_, comm_, call, stream_.get(), [&] {
      return library_.recv(out, bytes, nccl::kUint8, 0, comm_.comm, stream_.get());
    });
  }
  event_.record(stream_.get());
  event_.hold(stream);
}

}  // namespace onnxpar
