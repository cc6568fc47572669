#include "collective/device_span.h"

#include <cmath>

#include "transport/transport.h"

namespace onnxpar {
namespace {

constexpr int64_t kOld = 8'000'000'000;  // nanoseconds; a float of 8,000 ms is exact to 0.5 us
constexpr double kNanoseconds = 1e6;     // of a millisecond
// Clocks drift by less. In a short time, more comes from the comparison, which takes microseconds.
constexpr double kDrift = 1e-3;

}  // namespace

DeviceClock::DeviceClock() {
  record();
  marks_.back()->event.synchronize();
  begin_ = now_ns();
}

void DeviceClock::record() {
  marks_.push_back(std::make_unique<Mark>());
  marks_.back()->event.record(stream_.get());
  marks_.back()->recorded = now_ns();
}

size_t DeviceClock::mark() {
  if (now_ns() - marks_.back()->recorded > kOld) record();
  return marks_.size() - 1;
}

void DeviceClock::stop() {
  record();
  marks_.back()->event.synchronize();
  const int64_t end = now_ns();
  for (size_t i = 1; i < marks_.size(); ++i) {
    const Mark& before = *marks_[i - 1];
    marks_[i]->at = before.at + marks_[i]->event.since(before.event);
  }
  const double rate = static_cast<double>(end - begin_) / (marks_.back()->at * kNanoseconds);
  if (std::abs(rate - 1) < kDrift) rate_ = rate;
}

int64_t DeviceClock::time(const cuda::EventHandle& event, size_t mark) const {
  event.synchronize();
  const double at = marks_[mark]->at + event.since(marks_[mark]->event);
  return begin_ + static_cast<int64_t>(at * kNanoseconds * rate_);
}

DeviceSpan::DeviceSpan(std::shared_ptr<DeviceClock> clock, cuda::Stream stream)
    : clock_(std::move(clock)), stream_(stream), mark_(clock_->mark()) {
  begin_.record(stream_);
}

}  // namespace onnxpar
