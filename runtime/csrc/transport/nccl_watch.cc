#include "transport/nccl_watch.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace onnxpar {
namespace {

// How long the end of the communicators is waited for. It may wait for other ranks, and NCCL waits for
// every CUDA graph that holds calls of a communicator to be freed, also where it is aborted.
constexpr std::chrono::seconds kPatience{5};
// How long a call may take from asking whether it may to being in NCCL.
constexpr std::chrono::milliseconds kBeginning{100};

// Frees or aborts communicators, all at once: NCCL waits for what one of them has on the GPU, which
// may be queued behind a collective of another that only ends when that one is aborted; and ranks
// may have made their channels in different orders. Threads that do not come to an end are left.
void end_each(const cuda::Device& device, const std::vector<nccl::Comm>& comms,
              int (*end)(nccl::Comm)) {
  struct Ending {
    std::mutex mutex;
    std::condition_variable over;
    size_t left = 0;
  };
  const auto ending = std::make_shared<Ending>();
  ending->left = comms.size();
  for (nccl::Comm comm : comms) {
    std::thread([ending, device, comm, end] {
      try {
        device.adopt_thread();
        end(comm);
      } catch (const std::exception&) {
        // The device is gone, and all on it.
      }
      std::lock_guard lock(ending->mutex);
      --ending->left;
      ending->over.notify_all();
    }).detach();
  }
  std::unique_lock lock(ending->mutex);
  ending->over.wait_for(lock, kPatience, [&] { return ending->left == 0; });
}

}  // namespace

NcclWatch::NcclWatch(const nccl::Library& library, const cuda::Device& device, int rank,
                     double timeout_s, std::function<void(const std::string&)> report)
    : library_(library),
      device_(device),
      rank_(rank),
      timeout_s_(timeout_s),
      report_(std::move(report)) {
  thread_ = std::thread([this] { watch(); });
}

NcclWatch::~NcclWatch() { close(); }

void NcclWatch::add(NcclComm& comm) {
  std::lock_guard lock(mutex_);
  comms_.push_back(&comm);
}

void NcclWatch::abort(const std::string& message) {
  std::lock_guard lock(mutex_);
  if (abort_message_.empty()) abort_message_ = message.empty() ? "aborted" : message;
  wake_.notify_all();
}

bool NcclWatch::aborted() const {
  std::lock_guard lock(mutex_);
  return !abort_message_.empty();
}

void NcclWatch::check_alive(const std::string& who) const {
  std::lock_guard lock(mutex_);
  if (abort_message_.empty()) return;
  if (abort_message_.rfind(who, 0) == 0) throw std::runtime_error(abort_message_);
  throw std::runtime_error(who + " was aborted; first failure: " + abort_message_);
}

void NcclWatch::check(int result, const std::string& who, nccl::Comm comm) const {
  if (result == nccl::kSuccess) return;
  check_alive(who);
  const char* more = library_.last_error(comm);
  throw std::runtime_error(who + ": NCCL: " + library_.error_text(result) +
                           (more != nullptr && *more != '\0' ? std::string(" (") + more + ")" : ""));
}

void NcclWatch::submit(int queue, NcclComm& comm, const Call& call, cuda::Stream stream,
                       const std::function<int()>& f) {
  const std::string who = describe(rank_, call, comm.ranks);
  const bool captured = cuda::is_captured(stream);
  std::unique_ptr<cuda::EventHandle> done;
  {
    std::unique_lock lock(mutex_);
    if (!abort_message_.empty()) {
      lock.unlock();
      check_alive(who);
    }
    Queue& here = queues_[queue];
    // A thread that captures must not ask for events: it would end the capture.
    if (!captured) reap(here);
    here.calling = who;
    here.called = Clock::now();
    if (!spare_.empty()) {
      done = std::move(spare_.back());
      spare_.pop_back();
    }
  }
  const int result = f();
  // A graph is only recorded here. When it runs later its collectives are as many calls as its
  // launch is, and whoever waits for the launch is told of what NCCL reports.
  const bool noted = result == nccl::kSuccess && !captured && queue >= 0;
  if (noted) {
    if (!done) done = std::make_unique<cuda::EventHandle>();
    done->record(stream);
  }
  {
    std::lock_guard lock(mutex_);
    Queue& here = queues_[queue];
    here.calling.clear();
    if (!abort_message_.empty()) wake_.notify_all();
    if (noted) here.entries.push_back({who, std::move(done), Clock::now()});
  }
  check(result, who, comm.comm);
  check_alive(who);
}

void NcclWatch::wait(const std::string& who, bool limited, const std::function<bool()>& ready) {
  std::unique_lock lock(mutex_);
  const auto over = [&] { return ready() || !abort_message_.empty(); };
  if (!limited || timeout_s_ <= 0) {
    wake_.wait(lock, over);
  } else if (!wake_.wait_for(lock, std::chrono::duration<double>(timeout_s_), over)) {
    fail(lock, waited(who, timeout_s_));
  }
  const bool done = ready();
  lock.unlock();
  if (!done) check_alive(who);
}

void NcclWatch::wake() {
  std::lock_guard lock(mutex_);
  wake_.notify_all();
}

// Takes what has ended off a queue. The clock of what is then the first starts again.
void NcclWatch::reap(Queue& queue) {
  bool any = false;
  while (!queue.entries.empty() && queue.entries.front().done->done()) {
    spare_.push_back(std::move(queue.entries.front().done));
    queue.entries.pop_front();
    any = true;
  }
  if (any && !queue.entries.empty()) queue.entries.front().since = Clock::now();
}

// What has waited too long, as a message; empty where nothing has.
std::string NcclWatch::late(Clock::time_point now) {
  if (timeout_s_ <= 0) return {};
  const auto limit = std::chrono::duration<double>(timeout_s_);
  for (auto& entry : queues_) {
    Queue& queue = entry.second;
    if (entry.first < 0) continue;
    reap(queue);
    if (!queue.entries.empty() && now - queue.entries.front().since > limit) {
      return waited(queue.entries.front().who, timeout_s_);
    }
    if (!queue.calling.empty() && now - queue.called > limit) return waited(queue.calling, timeout_s_);
  }
  return {};
}

void NcclWatch::fail(std::unique_lock<std::mutex>& lock, const std::string& message) {
  if (!abort_message_.empty()) return;
  abort_message_ = message;
  wake_.notify_all();
  lock.unlock();
  report_(message);
  lock.lock();
}

void NcclWatch::fail(const std::string& message) {
  std::unique_lock lock(mutex_);
  fail(lock, message);
}

void NcclWatch::watch() {
  device_.adopt_thread();
  const double tick = timeout_s_ > 0 ? std::min(0.5, timeout_s_ / 4) : 0.5;
  std::unique_lock lock(mutex_);
  while (!stop_ && abort_message_.empty()) {
    wake_.wait_for(lock, std::chrono::duration<double>(tick),
                   [&] { return stop_ || !abort_message_.empty(); });
    if (stop_ || !abort_message_.empty()) break;
    std::string message;
    try {
      message = late(Clock::now());
    } catch (const std::exception& e) {
      message = "rank " + std::to_string(rank_) + ": the GPU failed: " + e.what();
    }
    for (size_t i = 0; message.empty() && i < comms_.size(); ++i) {
      int state = nccl::kSuccess;
      const int result = library_.comm_async_error(comms_[i]->comm, &state);
      if (result == nccl::kSuccess && (state == nccl::kSuccess || state == nccl::kInProgress)) {
        continue;
      }
      try {
        const int which = result == nccl::kSuccess ? state : result;
        lock.unlock();
        check(which, describe(rank_, Call("communication"), comms_[i]->ranks), comms_[i]->comm);
      } catch (const std::exception& e) {
        message = e.what();
      }
      lock.lock();
    }
    if (!message.empty()) fail(lock, message);
  }
  if (!abort_message_.empty()) end_communicators(lock);
}

// Ends what runs on the GPU, and calls of NCCL that wait for ranks. No further calls begin: submit
// asks first whether all was aborted. One that has just asked is given time to begin, since NCCL lets
// a call that runs be aborted, but none be made on what was.
void NcclWatch::end_communicators(std::unique_lock<std::mutex>& lock) {
  wake_.wait_for(lock, kBeginning, [&] {
    return std::all_of(queues_.begin(), queues_.end(),
                       [](const auto& entry) { return entry.second.calling.empty(); });
  });
  const std::vector<nccl::Comm> comms = take_communicators();
  lock.unlock();
  end_each(device_, comms, library_.comm_abort);
  lock.lock();
}

std::vector<nccl::Comm> NcclWatch::take_communicators() {
  std::vector<nccl::Comm> comms;
  for (NcclComm* comm : comms_) {
    const nccl::Comm taken = comm->comm.exchange(nullptr);
    if (taken != nullptr) comms.push_back(taken);
  }
  return comms;
}

void NcclWatch::close() {
  {
    std::lock_guard lock(mutex_);
    if (stop_) return;
    stop_ = true;
    wake_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  end_each(device_, take_communicators(), library_.comm_destroy);
}

}  // namespace onnxpar
