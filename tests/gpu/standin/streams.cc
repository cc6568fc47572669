// Streams, events and CUDA graphs, as "CUDA Programming Guide: Asynchronous Concurrent Execution" and
// "CUDA Graphs" of the same describe them.
//
// By default all is done in the call. With STANDIN_ASYNC=SEED a device does it later: it has as many queues
// as CUDA_DEVICE_MAX_CONNECTIONS says (8), streams are dealt out to them in turn, and a queue is a thread
// that does one thing after the other, so that what waits holds up all streams of its queue: the worst
// that CUDA allows. Queues take their time, which depends on the seed: some none, some a little, some much.
//
// Simulated time (`streams.h`) is kept in `Stream::time`; an event has that of its stream.
//
// A graph is done as one piece of work, in the order of its capture.
#include "streams.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "device.h"

extern "C" int cudaGetDevice(int* device);

namespace standin {

struct Point {
  std::mutex mutex;
  std::condition_variable reached;
  bool done = false;
};

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kInvalidHandle = 400, kNotReady = 600;
// cudaErrorStreamCapture…
constexpr int kUnsupported = 900, kInvalidated = 901, kUnmatched = 903, kUnjoined = 904,
              kIsolation = 905, kImplicit = 906, kCapturedEvent = 907;
constexpr unsigned kNonBlocking = 1;                  // cudaStreamNonBlocking
constexpr int kGlobal = 0, kOwnThread = 1;            // cudaStreamCaptureMode
constexpr int kNotCaptured = 0, kCaptured = 1;        // cudaStreamCaptureStatus
constexpr int kMostQueues = 32;

const char* seed() { return getenv("STANDIN_ASYNC"); }

bool asynchronous() {
  static const bool is = seed() != nullptr && *seed() != 0;
  return is;
}

void reach(Point& point) {
  std::lock_guard<std::mutex> lock(point.mutex);
  point.done = true;
  point.reached.notify_all();
}

bool reached(const PointRef& point) {
  if (point == nullptr) return true;
  std::lock_guard<std::mutex> lock(point->mutex);
  return point->done;
}

// Between a device's queue and the things on it: one thread.
class HardwareQueue {
 public:
  explicit HardwareQueue(uint64_t number) {
    random_ = (static_cast<uint64_t>(strtoll(seed(), nullptr, 10)) << 16) + number;
    constexpr uint64_t kPaces[] = {0, 1, 5};
    draw();
    pace_ = kPaces[draw() % 3];
    std::thread([this] { work(); }).detach();
  }
  PointRef put(Work work, std::vector<PointRef> after) {
    const PointRef done = std::make_shared<Point>();
    std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back({std::move(work), std::move(after), done});
    came_.notify_one();
    return done;
  }

 private:
  struct Item {
    Work work;
    std::vector<PointRef> after;
    PointRef done;
  };
  uint64_t draw() {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    return random_ >> 33;
  }
  // 0.1 ms in the mean at pace 1, with one pause in eight ten times as long.
  void pause() {
    const uint64_t time = pace_ * (draw() % 100) * (draw() % 8 == 0 ? 10 : 1);
    if (time != 0) std::this_thread::sleep_for(std::chrono::microseconds(time));
  }
  [[noreturn]] void work() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      came_.wait(lock, [&] { return !items_.empty(); });
      Item item = std::move(items_.front());
      items_.pop_front();
      lock.unlock();
      for (const PointRef& point : item.after) wait(point);
      pause();
      if (item.work) item.work();
      item.work = nullptr;
      reach(*item.done);
    }
  }
  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<Item> items_;
  uint64_t random_ = 0, pace_ = 0;
};

struct Capture;

struct Stream {
  int device;
  bool blocking;  // in order with the legacy stream
  HardwareQueue* queue;
  PointRef last;
  std::shared_ptr<Capture> capture;
  size_t captured = 0;  // pieces of work, of the capture under way
  double time = 0;      // when all that is on it is done, in simulated time
};

struct Capture {
  Stream* origin;
  int mode;
  std::thread::id thread;
  std::vector<Work> work;
  bool open = true, spoilt = false;
  std::map<Stream*, bool> joined;  // the other streams: whether what they do is waited for

  void spoil(const char* how) {
    standin_log("spoilt", "%s", how);
    spoilt = true;
  }
};

struct Event {
  PointRef point;
  // Where it was recorded in a capture:
  std::shared_ptr<Capture> capture;
  Stream* stream = nullptr;
  size_t captured = 0;
  double time = 0;
};

using Graph = std::shared_ptr<const std::vector<Work>>;

struct Device {
  Stream legacy;
  std::vector<HardwareQueue*> queues;
  size_t next = 0;
};

// Of this thread: one that only watches the device does not hold up the others.
thread_local double host_time = 0;

struct Timeline {
  std::mutex mutex;
  std::map<int, Device> devices;
  std::set<Stream*> streams;
  std::set<Capture*> captures;
  double computing = 0, communicating = 0;

  // When what is put on a stream now begins: not before the host puts it there.
  double begin(const Stream& stream) const {
    double found = std::max(stream.time, host_time);
    const Stream& legacy = devices.at(stream.device).legacy;
    if (stream.blocking) found = std::max(found, legacy.time);
    if (&stream != &legacy) return found;
    for (const Stream* other : streams) {
      if (other->blocking && other->device == stream.device) found = std::max(found, other->time);
    }
    return found;
  }
  static void host_waits(double time) { host_time = std::max(host_time, time); }

  HardwareQueue* queue(int index, Device& device) {
    if (!asynchronous()) return nullptr;
    if (device.queues.empty()) {
      const char* text = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
      const int count = text == nullptr ? 8 : std::clamp(atoi(text), 1, kMostQueues);
      device.queues.resize(static_cast<size_t>(count));
    }
    const size_t place = device.next++ % device.queues.size();
    HardwareQueue*& queue = device.queues[place];
    if (queue == nullptr) queue = new HardwareQueue(static_cast<uint64_t>(index) * 64 + place);
    return queue;
  }
  Device& device() {
    int index = 0;
    cudaGetDevice(&index);
    const auto found = devices.find(index);
    if (found != devices.end()) return found->second;
    Device& made = devices[index];
    made.legacy = {index, false, queue(index, made), nullptr, nullptr};
    return made;
  }
  // Null where there is no such stream.
  Stream* find(void* handle) {
    if (reinterpret_cast<uintptr_t>(handle) <= 1) return &device().legacy;
    Stream* stream = static_cast<Stream*>(handle);
    return streams.count(stream) != 0 ? stream : nullptr;
  }
  PointRef put(Stream& stream, Work work, PointRef after = nullptr) {
    std::vector<PointRef> all{std::move(after)};
    Device& own = devices.at(stream.device);
    if (stream.blocking) all.push_back(own.legacy.last);
    if (&stream == &own.legacy) {
      for (Stream* other : streams) {
        if (other->blocking && other->device == stream.device) all.push_back(other->last);
      }
    }
    all.erase(std::remove_if(all.begin(), all.end(), reached), all.end());
    return stream.last = stream.queue->put(std::move(work), std::move(all));
  }
  // What the legacy stream does would have to wait for a stream that is captured.
  bool spoils_captures(const Stream& stream) {
    bool spoils = false;
    if (&stream != &devices.at(stream.device).legacy) return false;
    for (Stream* other : streams) {
      if (!other->capture || !other->blocking || other->device != stream.device) continue;
      other->capture->spoil("work on the legacy stream");
      spoils = true;
    }
    return spoils;
  }
};

Timeline& timeline() {
  static Timeline* const the = new Timeline;  // never taken down: queues use it
  return *the;
}

thread_local int capture_mode = kGlobal;

int make(void** made, bool blocking) {
  Timeline& t = timeline();
  std::lock_guard<std::mutex> lock(t.mutex);
  Device& device = t.device();
  const int index = device.legacy.device;
  Stream* stream = new Stream{index, blocking, t.queue(index, device), nullptr, nullptr};
  t.streams.insert(stream);
  *made = stream;
  return kSuccess;
}

}  // namespace

void wait(const PointRef& point) {
  if (point == nullptr) return;
  std::unique_lock<std::mutex> lock(point->mutex);
  point->reached.wait(lock, [&] { return point->done; });
}

int enqueue(void* handle, Work work, PointRef* chain) {
  Timeline& t = timeline();
  {
    std::lock_guard<std::mutex> lock(t.mutex);
    Stream* stream = t.find(handle);
    if (stream == nullptr) return kInvalidHandle;
    if (stream->capture) {
      stream->capture->work.push_back(std::move(work));
      ++stream->captured;
      if (stream != stream->capture->origin) stream->capture->joined[stream] = false;
      return kSuccess;
    }
    if (t.spoils_captures(*stream)) return kImplicit;
    if (asynchronous()) {
      const PointRef done = t.put(*stream, std::move(work), chain != nullptr ? *chain : nullptr);
      if (chain != nullptr) *chain = done;
      return kSuccess;
    }
  }
  if (work) work();
  return kSuccess;
}

const Rates& rates() {
  static const Rates the = [] {
    Rates found;
    const char* text = getenv("STANDIN_CLOCK");
    if (text != nullptr && !asynchronous() && sscanf(text, "%lf:%lf", &found.flops, &found.bytes) == 2) {
      found.flops *= 1e-9;
      found.bytes *= 1e-9;
    }
    return found;
  }();
  return the;
}

double time_of(void* handle) {
  Timeline& t = timeline();
  std::lock_guard<std::mutex> lock(t.mutex);
  Stream* stream = t.find(handle);
  return stream != nullptr ? t.begin(*stream) : 0;
}

void compute(void* handle, double operations) {
  if (rates().flops == 0 || is_captured(handle)) return;
  Timeline& t = timeline();
  std::lock_guard<std::mutex> lock(t.mutex);
  Stream* stream = t.find(handle);
  if (stream == nullptr) return;
  const double taken = kKernelTime + operations / rates().flops;
  stream->time = t.begin(*stream) + taken;
  t.computing += taken;
}

void communicate(void* handle, double end, double taken) {
  Timeline& t = timeline();
  std::lock_guard<std::mutex> lock(t.mutex);
  Stream* stream = t.find(handle);
  if (stream == nullptr) return;
  stream->time = end;
  t.communicating += taken;
}

int enqueue_and_wait(void* handle, Work work) {
  PointRef done;
  {
    Timeline& t = timeline();
    std::lock_guard<std::mutex> lock(t.mutex);
    Stream* stream = t.find(handle);
    if (stream != nullptr && stream->capture) {
      stream->capture->spoil("the stream is waited for");
      return kUnsupported;
    }
  }
  const int result = enqueue(handle, std::move(work), &done);
  if (result != kSuccess) return result;
  wait(done);
  Timeline& t = timeline();
  std::lock_guard<std::mutex> lock(t.mutex);
  if (const Stream* stream = t.find(handle)) t.host_waits(t.begin(*stream));
  return result;
}

void wait_for_device() {
  std::vector<PointRef> last;
  {
    Timeline& t = timeline();
    std::lock_guard<std::mutex> lock(t.mutex);
    const Stream& legacy = t.device().legacy;
    last.push_back(legacy.last);
    t.host_waits(legacy.time);
    for (Stream* stream : t.streams) {
      if (stream->device != legacy.device) continue;
      last.push_back(stream->last);
      t.host_waits(stream->time);
    }
  }
  for (const PointRef& point : last) wait(point);
}

bool is_captured(void* handle) {
  Timeline& t = timeline();
  std::lock_guard<std::mutex> lock(t.mutex);
  Stream* stream = t.find(handle);
  return stream != nullptr && stream->capture != nullptr;
}

int forbidden(const char* call) {
  Timeline& t = timeline();
  std::lock_guard<std::mutex> lock(t.mutex);
  const std::thread::id self = std::this_thread::get_id();
  int result = kSuccess;
  for (Capture* capture : t.captures) {
    const bool own = capture->thread == self && capture->mode <= kOwnThread;
    const bool any = capture->mode == kGlobal && capture_mode == kGlobal;
    if (capture_mode > kOwnThread || !(own || any)) continue;
    capture->spoil(call);
    result = kUnsupported;
  }
  return result;
}

}  // namespace standin

using namespace standin;

extern "C" {

double standin_clock(int which) {
  Timeline& t = timeline();
  std::lock_guard<std::mutex> lock(t.mutex);
  return which == 0 ? host_time : which == 1 ? t.computing : t.communicating;
}

int cudaStreamCreate(void** stream) { return make(stream, true); }
int cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  return make(stream, (flags & kNonBlocking) == 0);
}
int cudaStreamCreateWithPriority(void** stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
// What is on it is still done.
int cudaStreamDestroy(void* handle) {
  Timeline& t = timeline();
  std::lock_guard<std::mutex> lock(t.mutex);
  Stream* stream = static_cast<Stream*>(handle);
  if (t.streams.erase(stream) == 0) return kInvalidHandle;
  delete stream;
  return kSuccess;
}
int cudaStreamSynchronize(void* stream) {
  standin_log("synchronize", "%p", stream);
  return enqueue_and_wait(stream, nullptr);
}
int cudaStreamQuery(void* handle) {
  Timeline& t = timeline();
  std::lock_guard<std::mutex> lock(t.mutex);
  Stream* stream = t.find(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (stream->capture) return kUnsupported;
  if (!reached(stream->last)) return kNotReady;
  t.host_waits(stream->time);
  return kSuccess;
}
int cudaDeviceSynchronize(void) {
  standin_log("synchronize", "device");
  if (const int result = forbidden("cudaDeviceSynchronize")) return result;
  wait_for_device();
  return kSuccess;
}
int cudaLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  return enqueue(stream, [=] { function(data); });
}

// Events.
int cudaEventCreate(void** event) {
  *event = new Event;
  return kSuccess;
}
int cudaEventCreateWithFlags(void** event, unsigned) { return cudaEventCreate(event); }
int cudaEventDestroy(void* event) {
  Timeline& t = timeline();
  std::lock_guard<std::mutex> lock(t.mutex);
  delete static_cast<Event*>(event);
  return kSuccess;
}
int cudaEventRecord(void* handle, void* stream_handle) {
  Timeline& t = timeline();
  std::lock_guard<std::mutex> lock(t.mutex);
  Event& event = *static_cast<Event*>(handle);
  Stream* stream = t.find(stream_handle);
  if (stream == nullptr) return kInvalidHandle;
  if (t.spoils_captures(*stream)) return kImplicit;
  event = {nullptr, stream->capture, stream, stream->captured, t.begin(*stream)};
  if (!stream->capture && asynchronous()) event.point = t.put(*stream, nullptr);
  return kSuccess;
}
int cudaEventRecordWithFlags(void* event, void* stream, unsigned) {
  return cudaEventRecord(event, stream);
}
int cudaStreamWaitEvent(void* handle, void* event_handle, unsigned) {
  Timeline& t = timeline();
  std::lock_guard<std::mutex> lock(t.mutex);
  const Event& event = *static_cast<Event*>(event_handle);
  Stream* stream = t.find(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (t.spoils_captures(*stream)) return kImplicit;
  if (event.capture) {
    Capture& capture = *event.capture;
    if (!capture.open || (stream->capture && stream->capture != event.capture)) return kIsolation;
    if (stream != capture.origin && !stream->capture) {
      stream->captured = 0;
      capture.joined[stream] = false;
    }
    stream->capture = event.capture;
    if (event.stream != stream && event.stream != capture.origin) {
      capture.joined[event.stream] = event.captured == event.stream->captured;
    }
    return kSuccess;
  }
  if (stream->capture && event.stream != nullptr) {
    stream->capture->spoil("an event that was recorded outside is waited for");
    return kIsolation;
  }
  if (!reached(event.point)) t.put(*stream, nullptr, event.point);
  stream->time = std::max(stream->time, event.time);
  return kSuccess;
}
int cudaEventQuery(void* handle) {
  if (const int result = forbidden("cudaEventQuery")) return result;
  Timeline& t = timeline();
  std::lock_guard<std::mutex> lock(t.mutex);
  const Event& event = *static_cast<Event*>(handle);
  if (event.capture) return kCapturedEvent;
  // In simulated time too, a query does not wait: the caller does not need the answer.
  return reached(event.point) ? kSuccess : kNotReady;
}
int cudaEventSynchronize(void* handle) {
  standin_log("synchronize", "event");
  if (const int result = forbidden("cudaEventSynchronize")) return result;
  PointRef point;
  {
    Timeline& t = timeline();
    std::lock_guard<std::mutex> lock(t.mutex);
    const Event& event = *static_cast<Event*>(handle);
    if (event.capture) return kCapturedEvent;
    point = event.point;
    t.host_waits(event.time);
  }
  wait(point);
  return kSuccess;
}
// In simulated time.
int cudaEventElapsedTime(float* milliseconds, void* from, void* to) {
  Timeline& t = timeline();
  std::lock_guard<std::mutex> lock(t.mutex);
  const double nanoseconds = static_cast<Event*>(to)->time - static_cast<Event*>(from)->time;
  *milliseconds = static_cast<float>(nanoseconds / 1e6);
  return kSuccess;
}

// Graphs.
int cudaThreadExchangeStreamCaptureMode(int* mode) {
  standin_log("mode", "%d", *mode);
  std::swap(capture_mode, *mode);
  return kSuccess;
}
int cudaStreamIsCapturing(void* stream, int* status) {
  *status = is_captured(stream) ? kCaptured : kNotCaptured;
  return kSuccess;
}
int cudaStreamBeginCapture(void* handle, int mode) {
  standin_log("capture", "%p\t%d", handle, mode);
  Timeline& t = timeline();
  std::lock_guard<std::mutex> lock(t.mutex);
  Stream* stream = t.find(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (stream->capture || stream == &t.devices.at(stream->device).legacy) return kUnsupported;
  stream->captured = 0;
  stream->capture = std::make_shared<Capture>();
  stream->capture->origin = stream;
  stream->capture->mode = mode;
  stream->capture->thread = std::this_thread::get_id();
  t.captures.insert(stream->capture.get());
  return kSuccess;
}
int cudaStreamEndCapture(void* handle, void** graph) {
  Timeline& t = timeline();
  std::lock_guard<std::mutex> lock(t.mutex);
  *graph = nullptr;
  Stream* stream = t.find(handle);
  if (stream == nullptr || !stream->capture) return kInvalidValue;
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture->origin != stream) return kUnmatched;
  capture->open = false;
  t.captures.erase(capture.get());
  for (Stream* other : t.streams) {
    if (other->capture == capture) other->capture = nullptr;
  }
  if (capture->spoilt) return kInvalidated;
  for (const auto& [other, joined] : capture->joined) {
    if (!joined) return kUnjoined;
  }
  *graph = new Graph(std::make_shared<std::vector<Work>>(std::move(capture->work)));
  return kSuccess;
}
int cudaGraphInstantiate(void** exec, void* graph, unsigned long long) {
  *exec = new Graph(*static_cast<Graph*>(graph));
  return kSuccess;
}
int cudaGraphDestroy(void* graph) {
  delete static_cast<Graph*>(graph);
  return kSuccess;
}
int cudaGraphExecDestroy(void* exec) { return cudaGraphDestroy(exec); }
int cudaGraphLaunch(void* exec, void* stream) {
  standin_log("graph", "%p", stream);
  return enqueue(stream, [graph = *static_cast<Graph*>(exec)] {
    for (const Work& work : *graph) {
      if (work) work();
    }
  });
}
}
