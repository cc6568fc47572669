#include "abi/cuda_driver.h"

#include <dlfcn.h>

#include <stdexcept>

namespace onnxpar::cuda {
namespace {

Driver open_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw std::runtime_error(std::string("the CUDA driver cannot be opened (") + dlerror() +
                             "): it comes with NVIDIA's driver for the GPU");
  }
  Driver d;
  const auto find = [&](const char* name) {
    void* entry = dlsym(library, name);
    if (entry == nullptr) {
      throw std::runtime_error(std::string("libcuda.so.1 has no ") + name +
                               ": NVIDIA's driver is too old");
    }
    return entry;
  };
#define X(member, name, ...) d.member = reinterpret_cast<decltype(d.member)>(find(name));
  ONNXPAR_CUDA_DRIVER(X)
#undef X
  const int result = d.init(0);
  if (result != kSuccess) {
    const char* text = nullptr;
    d.error_text(result, &text);
    throw std::runtime_error(std::string("the CUDA driver cannot be used: cuInit: ") +
                             (text != nullptr ? text : std::to_string(result).c_str()));
  }
  return d;
}

}  // namespace

const Driver& driver() {
  static const Driver opened = open_driver();  // tried again where it threw
  return opened;
}

void check(int result, const char* what, const char* advice) {
  if (result == kSuccess) return;
  const char* text = nullptr;
  driver().error_text(result, &text);
  throw std::runtime_error(std::string(what) + ": " +
                           (text != nullptr ? text : ("error " + std::to_string(result)).c_str()) +
                           advice);
}

Device::Device(int index) : index_(index) {
  int count = 0;
  check(driver().device_count(&count), "cuDeviceGetCount");
  if (index < 0 || index >= count) {
    throw std::runtime_error("CUDA device " + std::to_string(index) + " does not exist; there are " +
                             std::to_string(count));
  }
  int device = 0;
  check(driver().device_get(&device, index), "cuDeviceGet");
  check(driver().primary_retain(&context_, device), "cuDevicePrimaryCtxRetain");
  make_current();
}

void Device::make_current() const {
  Context now = nullptr;
  check(driver().context_get(&now), "cuCtxGetCurrent");
  if (now != context_) check(driver().context_set(context_), "cuCtxSetCurrent");
}

void Device::adopt_thread() const {
  make_current();
  int mode = kOwnCaptures;
  check(driver().exchange_capture_mode(&mode), "cuThreadExchangeStreamCaptureMode");
}

EventHandle::EventHandle(unsigned flags) {
  check(driver().event_create(&event_, flags), "cuEventCreate");
}
EventHandle::~EventHandle() { driver().event_destroy(event_); }
void EventHandle::record(Stream stream) {
  check(driver().event_record(event_, stream), "cuEventRecord");
}
void EventHandle::hold(Stream stream) const {
  check(driver().stream_wait(stream, event_, 0), "cuStreamWaitEvent");
}
bool EventHandle::done() const {
  const int result = driver().event_query(event_);
  if (result == kNotReady || result == kDeinitialized) return false;
  check(result, "cuEventQuery");
  return true;
}
void EventHandle::synchronize() const {
  check(driver().event_synchronize(event_), "cuEventSynchronize");
}
double EventHandle::since(const EventHandle& earlier) const {
  float milliseconds = 0;
  check(driver().event_elapsed(&milliseconds, earlier.event_, event_), "cuEventElapsedTime");
  return milliseconds;
}

bool is_captured(Stream stream) {
  int status = 0;  // CU_STREAM_CAPTURE_STATUS_NONE
  check(driver().stream_is_capturing(stream, &status), "cuStreamIsCapturing");
  return status != 0;
}

StreamHandle::StreamHandle() {
  check(driver().stream_create(&stream_, kStreamNonBlocking), "cuStreamCreate");
}
StreamHandle::~StreamHandle() { driver().stream_destroy(stream_); }

}  // namespace onnxpar::cuda
