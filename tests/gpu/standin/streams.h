// When things happen on a stand-in device: streams, events and captures, for the stand-ins that put work
// on streams. Every process has one copy, in libcudart's stand-in; the others find it there.
#pragma once
#include <functional>
#include <memory>

#pragma GCC visibility push(default)
namespace standin {

using Work = std::function<void()>;

// A place in the order of a stream, which the device comes to.
struct Point;
using PointRef = std::shared_ptr<Point>;

// Has work done on a stream (null and 1 are CUDA's legacy stream), behind what is on it. Returns a CUDA
// error. Without STANDIN_ASYNC it is done before this returns. What has a chain is also done behind
// the work that had the chain before. Where the stream is captured, it becomes part of the graph.
int enqueue(void* stream, Work work, PointRef* chain = nullptr);
// Likewise, and returns once it was done: not for a stream that is captured.
int enqueue_and_wait(void* stream, Work work);
// Returns when the device has come there; at once for null.
void wait(const PointRef& point);
// Returns when all streams of the thread's device have done what is on them now.
void wait_for_device();
bool is_captured(void* stream);
// The error of a call that this thread must not make, such as one for memory, while a stream is
// captured; the capture is spoilt then.
int forbidden(const char* call);


// Simulated time, in nanoseconds: with STANDIN_CLOCK=FLOPS:BYTES and without STANDIN_ASYNC. Kernels and
// messages are carried out in the call, as always; only what they would take is added up, for each
// stream. A thread's time passes where it waits for the device.
struct Rates {
  double flops = 0, bytes = 0;  // per nanosecond; 0 where no time is simulated
};
const Rates& rates();
constexpr double kKernelTime = 2000;  // of a kernel beside its arithmetic
// Lets a kernel with so many operations take its time on a stream.
void compute(void* stream, double operations = 0);
// When what is put on a stream now would begin.
double time_of(void* stream);
// Says when communication on a stream ends, and how long it takes.
void communicate(void* stream, double end, double taken);

}  // namespace standin
// Which of 0: the thread's time, 1: what kernels took, 2: what communication took; nanoseconds.
extern "C" double standin_clock(int which);
#pragma GCC visibility pop
