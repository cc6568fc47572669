// When calls ran on a GPU: events on their streams, in the time of the host's clock.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "abi/cuda_driver.h"

namespace onnxpar {

// The clock of a GPU, which is compared with that of the host at the beginning and at the end. In
// between it waits for nothing. It is used in the GPU's context.
class DeviceClock {
 public:
  // Compares the clocks. Waits for the GPU, but not for what it computes.
  DeviceClock();
  // The mark from which events that are recorded now are measured.
  size_t mark();
  // Compares the clocks once more, for `time`.
  void stop();
  // Nanoseconds of the host's clock when an event was reached; waits for it.
  int64_t time(const cuda::EventHandle& event, size_t mark) const;

 private:
  // The distance of two events is a float of milliseconds, which is too coarse after a while.
  struct Mark {
    cuda::EventHandle event{cuda::kEventTiming};
    int64_t recorded = 0;  // by the host's clock
    double at = 0;         // milliseconds of the GPU from the first mark, once it has stopped
  };
  void record();

  cuda::StreamHandle stream_;
  std::vector<std::unique_ptr<Mark>> marks_;
  int64_t begin_ = 0;  // by the host's clock, at the first mark
  double rate_ = 1;    // of the host's clock to that of the GPU
};

// The time between two places on a stream.
class DeviceSpan {
 public:
  // From what is on the stream by now.
  DeviceSpan(std::shared_ptr<DeviceClock> clock, cuda::Stream stream);
  // To what is on the stream by now.
  void end() { end_.record(stream_); }
  int64_t begin_ns() const { return clock_->time(begin_, mark_); }
  int64_t end_ns() const { return clock_->time(end_, mark_); }

 private:
  const std::shared_ptr<DeviceClock> clock_;
  const cuda::Stream stream_;
  const size_t mark_;
  cuda::EventHandle begin_{cuda::kEventTiming};
  cuda::EventHandle end_{cuda::kEventTiming};
};

}  // namespace onnxpar
