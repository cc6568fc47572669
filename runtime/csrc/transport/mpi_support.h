// Helpers of the MPI transport: error codes as exceptions, large counts, and the watchdog.
#pragma once

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "transport/transport.h"

namespace onnxpar {

using Clock = std::chrono::steady_clock;

inline constexpr size_t kLargestCount = size_t{1} << 30;  // of bytes in one call

inline std::string mpi_message(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return "error " + std::to_string(code);
  return {text, static_cast<size_t>(length)};
}

// An error of MPI. After it the state of pending messages is unknown.
struct MpiError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void check(int code, const char* function) {
  if (code == MPI_SUCCESS) return;
  throw MpiError(std::string(function) + ": " + mpi_message(code));
}

// `bytes` bytes as a datatype and a count that fits in an int.
class Bytes {
 public:
  explicit Bytes(size_t bytes) : count_(static_cast<int>(bytes)) {
    if (bytes <= kLargestCount) return;
    MPI_Datatype unit = MPI_DATATYPE_NULL;
    check(MPI_Type_contiguous(static_cast<int>(kLargestCount), MPI_BYTE, &unit),
          "MPI_Type_contiguous");
    const int lengths[2] = {static_cast<int>(bytes / kLargestCount),
                            static_cast<int>(bytes % kLargestCount)};
    const MPI_Aint offsets[2] = {0, static_cast<MPI_Aint>(bytes - bytes % kLargestCount)};
    const MPI_Datatype types[2] = {unit, MPI_BYTE};
    check(MPI_Type_create_struct(2, lengths, offsets, types, &type_), "MPI_Type_create_struct");
    check(MPI_Type_commit(&type_), "MPI_Type_commit");
    MPI_Type_free(&unit);
    owned_ = true;
    count_ = 1;
  }
  ~Bytes() {
    if (owned_) MPI_Type_free(&type_);
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  MPI_Datatype type() const { return type_; }
  int count() const { return count_; }

 private:
  MPI_Datatype type_ = MPI_BYTE;
  int count_;
  bool owned_ = false;
};

// Ends the job when one call waits too long: a blocking MPI call cannot be interrupted.
class Watchdog {
 public:
  // The ranks that have not come to a call, as far as they are known; the watching thread calls it.
  using Missing = std::function<std::vector<int>()>;

 private:
  struct Slot {
    uint64_t number = 0;         // of calls so far
    const Call* call = nullptr;  // null between calls
    const std::vector<int>* ranks = nullptr;
    const Missing* missing = nullptr;
  };

 public:
  // `concurrent` is whether threads may call MPI at the same time.
  Watchdog(int rank, const TransportOptions& options, MPI_Comm comm, bool concurrent)
      : rank_(rank),
        timeout_s_(options.timeout_s),
        failing_(options.failing),
        comm_(comm),
        concurrent_(concurrent) {
    if (timeout_s_ > 0) thread_ = std::thread([this] { watch(); });
  }
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      wake_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

  // Marks the calls on one lane as waiting, from construction to destruction.
  class Guard {
   public:
    Guard(Watchdog& dog, Lane lane, const Call& call, const std::vector<int>& ranks,
          const Missing& missing)
        : dog_(dog), slot_(dog.slots_[static_cast<int>(lane)]) {
      if (dog_.timeout_s_ <= 0) return;
      std::lock_guard lock(dog_.mutex_);
      // The watching thread reads the clock; reading it here would cost as much as all the rest.
      slot_ = {slot_.number + 1, &call, &ranks, &missing};
    }
    ~Guard() {
      if (dog_.timeout_s_ <= 0) return;
      std::lock_guard lock(dog_.mutex_);
      slot_.call = nullptr;
    }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    Watchdog& dog_;
    Slot& slot_;
  };

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    const auto tick = std::chrono::duration<double>(std::min(1.0, timeout_s_ / 4));
    struct {
      uint64_t number = 0;
      Clock::time_point since;
    } seen[kLanes];
    while (!stop_) {
      wake_.wait_for(lock, tick);
      for (int lane = 0; lane < kLanes; ++lane) {
        const Slot& slot = slots_[lane];
        if (slot.call == nullptr) continue;
        if (slot.number != seen[lane].number) seen[lane] = {slot.number, Clock::now()};
        const std::chrono::duration<double> passed = Clock::now() - seen[lane].since;
        if (passed.count() < timeout_s_) continue;
        const std::string text = waited(describe(rank_, *slot.call, *slot.ranks), passed.count(),
                                        (*slot.missing)());
        std::fprintf(stderr, "r%d | %s\n", rank_, text.c_str());
        std::fflush(stderr);
        if (failing_) failing_(text);
        // Another thread is in a call of MPI. mpirun ends the others as well when a process ends.
        if (concurrent_) MPI_Abort(comm_, 1);
        _exit(1);
      }
    }
  }

  const int rank_;
  const double timeout_s_;
  const std::function<void(const std::string&)> failing_;
  MPI_Comm comm_;
  const bool concurrent_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  Slot slots_[kLanes];
  std::thread thread_;
};

}  // namespace onnxpar
