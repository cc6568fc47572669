// The part of the CUDA driver that this library uses, opened at run time.
//
// The build needs neither CUDA's headers nor its libraries: `libcuda.so.1` comes with the driver, its
// C interface only ever grows, and the entries in use are declared here by ourselves, by the names
// that the library exports (a number behind a name is the version of its arguments). Streams and
// contexts are those that onnxruntime's CUDA provider uses: the runtime interface hands out the
// driver's own, and works in the device's primary context.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace onnxpar::cuda {

// Opaque handles of the driver. Device memory is held as a pointer, which is what onnxruntime hands
// out; the driver's own type for it is an integer of the same size.
using Context = void*;
using Stream = void*;
using Event = void*;
using Module = void*;
using Function = void*;

inline constexpr int kSuccess = 0;
inline constexpr int kDeinitialized = 4;           // CUDA_ERROR_DEINITIALIZED
inline constexpr int kNotReady = 600;              // CUDA_ERROR_NOT_READY
inline constexpr unsigned kStreamNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kEventTiming = 0;        // CU_EVENT_DEFAULT
inline constexpr unsigned kEventDisableTiming = 2; // CU_EVENT_DISABLE_TIMING
inline constexpr unsigned kHostAllocPortable = 1;  // CU_MEMHOSTALLOC_PORTABLE
inline constexpr int kOwnCaptures = 1;             // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
inline constexpr unsigned kMemoryUnified = 4;      // CU_MEMORYTYPE_UNIFIED

// CUDA_MEMCPY2D: `height` rows of `width` bytes. With kMemoryUnified the driver tells host from
// device memory by the address.
struct Copy2D {
  size_t source_x = 0, source_y = 0;
  unsigned source_type = kMemoryUnified;
  const void* source_host = nullptr;
  const void* source = nullptr;
  void* source_array = nullptr;
  size_t source_pitch = 0;
  size_t target_x = 0, target_y = 0;
  unsigned target_type = kMemoryUnified;
  void* target_host = nullptr;
  void* target = nullptr;
  void* target_array = nullptr;
  size_t target_pitch = 0;
  size_t width = 0, height = 0;
};
static_assert(sizeof(Copy2D) == 128);

// X(member, exported name, arguments). Every entry returns a CUresult.
#define ONNXPAR_CUDA_DRIVER(X)                                                                  \
  X(init, "cuInit", unsigned)                                                                   \
  X(error_text, "cuGetErrorString", int, const char**)                                          \
  X(device_count, "cuDeviceGetCount", int*)                                                     \
  X(device_get, "cuDeviceGet", int*, int)                                                       \
  X(device_attribute, "cuDeviceGetAttribute", int*, int, int)                                   \
  X(primary_retain, "cuDevicePrimaryCtxRetain", Context*, int)                                  \
  X(context_set, "cuCtxSetCurrent", Context)                                                    \
  X(context_get, "cuCtxGetCurrent", Context*)                                                   \
  X(context_device, "cuCtxGetDevice", int*)                                                     \
  X(stream_create, "cuStreamCreate", Stream*, unsigned)                                         \
  X(stream_destroy, "cuStreamDestroy_v2", Stream)                                               \
  X(stream_synchronize, "cuStreamSynchronize", Stream)                                          \
  X(stream_wait, "cuStreamWaitEvent", Stream, Event, unsigned)                                  \
  X(stream_is_capturing, "cuStreamIsCapturing", Stream, int*)                                   \
  X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", int*)                           \
  X(event_create, "cuEventCreate", Event*, unsigned)                                            \
  X(event_destroy, "cuEventDestroy_v2", Event)                                                  \
  X(event_record, "cuEventRecord", Event, Stream)                                               \
  X(event_query, "cuEventQuery", Event)                                                         \
  X(event_synchronize, "cuEventSynchronize", Event)                                             \
  X(event_elapsed, "cuEventElapsedTime", float*, Event, Event)                               \
  X(alloc, "cuMemAlloc_v2", void**, size_t)                                                     \
  X(free, "cuMemFree_v2", void*)                                                                \
  X(host_alloc, "cuMemHostAlloc", void**, size_t, unsigned)                                     \
  X(host_free, "cuMemFreeHost", void*)                                                          \
  X(copy, "cuMemcpyAsync", void*, const void*, size_t, Stream)                                  \
  X(copy_2d, "cuMemcpy2DAsync_v2", const Copy2D*, Stream)                                       \
  X(set_8, "cuMemsetD8Async", void*, unsigned char, size_t, Stream)                             \
  X(module_load, "cuModuleLoadData", Module*, const void*)                                      \
  X(module_function, "cuModuleGetFunction", Function*, Module, const char*)                     \
  X(launch, "cuLaunchKernel", Function, unsigned, unsigned, unsigned, unsigned, unsigned,       \
    unsigned, unsigned, Stream, void**, void**)

struct Driver {
#define X(member, name, ...) int (*member)(__VA_ARGS__) = nullptr;
  ONNXPAR_CUDA_DRIVER(X)
#undef X
};

// The driver, opened and initialised at the first call. Throws std::runtime_error saying what is
// missing: the library, an entry, or a device.
const Driver& driver();

// Throws std::runtime_error with the driver's text, and the advice behind it, where a call failed.
void check(int result, const char* what, const char* advice = "");

// How what users lack is named at the end of messages.
inline constexpr const char* kExtra = "pip install 'onnxpar[cuda]'";

// One GPU as a rank uses it: its primary context, which is never given back.
class Device {
 public:
  // Makes it current. Throws std::runtime_error where it does not exist or cannot be used.
  explicit Device(int index);
  int index() const { return index_; }
  // Calls of the driver on this thread are about this device from here on.
  void make_current() const;
  // Likewise, for a thread of our own: what it calls breaks no capture of another thread's.
  void adopt_thread() const;

 private:
  int index_;
  Context context_ = nullptr;
};

// An event that is recorded again and again, without timing unless the flags say so.
class EventHandle {
 public:
  explicit EventHandle(unsigned flags = kEventDisableTiming);
  ~EventHandle();
  EventHandle(const EventHandle&) = delete;
  EventHandle& operator=(const EventHandle&) = delete;
  void record(Stream stream);
  // What is enqueued on the stream from here on comes after what was recorded last.
  void hold(Stream stream) const;
  // Throws what the device reports. While the process ends, which takes the driver from threads that
  // still run, nothing is done any more, and nothing has failed.
  bool done() const;
  void synchronize() const;
  // Milliseconds of the GPU between two events with timing, both of which have been reached.
  double since(const EventHandle& earlier) const;

 private:
  Event event_ = nullptr;
};

// Whether the stream's work is captured for a graph.
bool is_captured(Stream stream);

class StreamHandle {
 public:
  StreamHandle();
  ~StreamHandle();
  StreamHandle(const StreamHandle&) = delete;
  StreamHandle& operator=(const StreamHandle&) = delete;
  Stream get() const { return stream_; }

 private:
  Stream stream_ = nullptr;
};

}  // namespace onnxpar::cuda
