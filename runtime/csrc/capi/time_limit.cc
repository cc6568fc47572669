#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "capi/capi.h"

namespace onnxpar {

// A thread that ends the process unless it is told in time that all is well.
class TimeLimit {
 public:
  TimeLimit(double seconds, std::string message)
      : message_(std::move(message)), thread_([this, seconds] { watch(seconds); }) {}

  ~TimeLimit() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      kept_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

 private:
  void watch(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return kept_; })) {
      return;
    }
    // The process ends all the same if nobody can read the message.
    [[maybe_unused]] const auto written = write(STDERR_FILENO, message_.data(), message_.size());
    _exit(1);
  }

  const std::string message_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool kept_ = false;
  std::thread thread_;  // Last, because it uses the others.
};

}  // namespace onnxpar

onnxpar::TimeLimit* onnxpar_begin_limit(double seconds, const char* message) {
  try {
    return new onnxpar::TimeLimit(seconds, message);
  } catch (...) {
    return nullptr;
  }
}

void onnxpar_end_limit(onnxpar::TimeLimit* limit) { delete limit; }
