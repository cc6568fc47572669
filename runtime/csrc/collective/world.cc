#include "collective/world.h"

#include <stdexcept>

#include "collective/device_rank.h"

namespace onnxpar {

RankContext::RankContext(std::unique_ptr<Transport> transport)
    : transport_(std::move(transport)), rank_(transport_->rank()), size_(transport_->size()) {}

RankContext::~RankContext() = default;

Transport& RankContext::transport() {
  if (closed_) throw failure("its world was closed");
  return *transport_;
}

std::runtime_error RankContext::failure(const std::string& what) const {
  return std::runtime_error("rank " + std::to_string(rank_) + ": " + what);
}

DeviceRank* RankContext::device() {
  transport();
  return device_.get();
}

void RankContext::open_device(std::unique_ptr<DeviceRank> device) {
  if (device_) {
    throw std::invalid_argument("rank " + std::to_string(rank_) + ": it has a device already");
  }
  device_ = std::move(device);
}

int64_t RankContext::start(std::shared_ptr<Request> request) {
  if (!transport().concurrent()) run(*request, memory_);
  std::lock_guard lock(mutex_);
  const int64_t number = next_++;
  requests_[number] = request;
  if (request->done) return number;
  if (stop_) throw failure("its world was closed");
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  queue_.push_back(std::move(request));
  queued_.notify_one();
  return number;
}

std::shared_ptr<Request> RankContext::wait(int64_t number, const std::string& where) {
  std::unique_lock lock(mutex_);
  const auto found = requests_.find(number);
  if (found == requests_.end()) {
    throw failure(where + ": its handle is not one of a Start that still runs");
  }
  std::shared_ptr<Request> request = found->second;
  finished_.wait(lock, [&] { return request->done; });
  requests_.erase(number);
  if (!request->error.empty()) throw std::runtime_error(request->error);
  return request;
}

void RankContext::drain(const std::vector<int64_t>& numbers) {
  std::unique_lock lock(mutex_);
  for (int64_t number : numbers) {
    const auto found = requests_.find(number);
    if (found == requests_.end()) continue;
    const std::shared_ptr<Request> request = found->second;
    finished_.wait(lock, [&] { return request->done; });
    requests_.erase(number);
  }
}

void RankContext::start_ahead(std::shared_ptr<Request> request) {
  const void* const in = request->in;
  drop_ahead(in);  // one that nobody took belongs to a step that failed
  ahead_[in] = start(std::move(request));
}

void RankContext::drop_ahead(const void* in) {
  const auto found = ahead_.find(in);
  if (found == ahead_.end()) return;
  drain({found->second});
  ahead_.erase(found);
}

std::shared_ptr<Request> RankContext::take_ahead(const Collective& collective, const void* in) {
  const auto found = ahead_.find(in);
  if (found == ahead_.end()) return nullptr;
  const int64_t number = found->second;
  ahead_.erase(found);
  std::shared_ptr<Request> request = wait(number, collective.where);
  if (request->collective.signature != collective.signature ||
      request->collective.group != collective.group) {
    throw failure(collective.where + ": another collective was started ahead on its operand: " +
                  request->collective.where);
  }
  return request;
}

void RankContext::run(Request& request, Memory& memory) {
  std::string error;
  try {
    execute(*transport_, *request.group, request.collective, request.in, request.result,
            request.input, request.type, memory, nullptr);
  } catch (const std::exception& e) {
    error = e.what();
  }
  std::lock_guard lock(mutex_);
  request.error = std::move(error);
  request.done = true;
  finished_.notify_all();
}

void RankContext::work() {
  HostMemory memory;  // the foreground uses its own at the same time
  std::unique_lock lock(mutex_);
  while (true) {
    queued_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::shared_ptr<Request> request = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    run(*request, memory);
    lock.lock();
  }
}

void RankContext::abort(const std::string& message) {
  if (closed_) return;
  if (device_) device_->transport->abort(message);
  transport_->abort(message);
}

void RankContext::close() {
  if (closed_.exchange(true)) return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    queued_.notify_all();
  }
  // Queued collectives still run: they fail at once on a transport that can be stopped, and complete
  // with the other ranks on one that cannot.
  if (device_) device_->transport->stop();
  transport_->stop();
  if (worker_.joinable()) worker_.join();
  if (device_) device_->transport->close();
  transport_->close();
}

RankContext& World::rank(int index) const {
  const auto found = ranks.find(index);
  if (found == ranks.end()) {
    throw std::invalid_argument("rank " + std::to_string(index) +
                                " is not in this process, of a world of " +
                                std::to_string(size) + " ranks");
  }
  return *found->second;
}

}  // namespace onnxpar
