#include "collective/world.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "collective/device_rank.h"

namespace onnxpar {

RankContext::RankContext(std::unique_ptr<Transport> transport, std::shared_ptr<CallLog> log)
    : transport_(std::move(transport)),
      rank_(transport_->rank()),
      size_(transport_->size()),
      calls_(log ? std::move(log) : std::make_shared<CallLog>(rank_, size_)) {}

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
    throw std::invalid_argument("rank " + std::to_string(rank_) + " already has a device");
  }
  device_ = std::move(device);
}

void RankContext::start(const std::vector<const void*>& keys, std::shared_ptr<Request> request) {
  for (const void* key : keys) finished(key);
  const bool background = background_ && transport().concurrent();
  if (!background || !transport().overlaps(*request->group)) run(*request, memory_);
  std::lock_guard lock(mutex_);
  // Nobody may wait for one that never runs.
  if (stop_ && !request->done) throw failure("its world was closed");
  for (const void* key : keys) requests_[key] = request;
  if (request->done) return;
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  queue_.push_back(std::move(request));
  queued_.notify_one();
}

void RankContext::hold(int64_t order, std::vector<const void*> keys,
                       std::shared_ptr<Request> request) {
  held_[order] = {std::move(keys), std::move(request)};
}

void RankContext::start_held() {
  for (auto& [order, held] : std::exchange(held_, {})) start(held.keys, std::move(held.request));
}

void RankContext::settle() {
  if (device_) {
    device_->device.make_current();
    cuda::EventHandle reached;
    reached.record(device_->background.get());
    reached.synchronize();
  }
  finish_started();
  std::lock_guard lock(mutex_);
  for (const auto& [key, request] : requests_) {
    if (request->later && !request->error.empty()) throw std::runtime_error(request->error);
  }
}

void RankContext::finish_started() noexcept {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] {
    return std::all_of(requests_.begin(), requests_.end(),
                       [](const auto& started) { return started.second->done; });
  });
}

std::shared_ptr<Request> RankContext::finished(const void* key) {
  std::unique_lock lock(mutex_);
  const auto found = requests_.find(key);
  if (found == requests_.end()) return nullptr;
  const std::shared_ptr<Request> request = found->second;
  if (!request->done) {
    const CallLog::Entry entry(*calls_, CallKind::kWait, request->collective.where,
                               *request->group);
    finished_.wait(lock, [&] { return request->done; });
  }
  requests_.erase(key);
  return request;
}

std::shared_ptr<Request> RankContext::take(const void* key) {
  std::shared_ptr<Request> request = finished(key);
  if (request != nullptr && !request->error.empty()) throw std::runtime_error(request->error);
  return request;
}

void RankContext::drop(const void* key, const std::weak_ptr<Request>& request) {
  {
    std::lock_guard lock(mutex_);
    const auto found = requests_.find(key);
    // The key may be that of another request by now, whose result is in the same memory.
    if (found == requests_.end() || found->second != request.lock()) return;
  }
  finished(key);
}

void RankContext::run(Request& request, Memory& memory) {
  std::string error;
  try {
    execute(*transport_, *request.group, request.collective, request.operands, request.type, memory,
            nullptr, *calls_, &memory != &memory_);
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
