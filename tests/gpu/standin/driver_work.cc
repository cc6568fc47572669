// The part of the CUDA driver's interface that does something: contexts, memory, streams and events
// as the runtime's stand-in has them, and kernels, which the stand-in of NVRTC has made for the host.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "device.h"
#include "launch.h"
#include "streams.h"

extern "C" {

int cudaGetDevice(int* device);
int cudaSetDevice(int device);
int cudaMalloc(void** address, size_t size);
int cudaFree(void* address);
int cudaHostAlloc(void** address, size_t size, unsigned flags);
int cudaFreeHost(void* address);
int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream);
int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                      size_t height, int kind, void* stream);
int cudaMemsetAsync(void* at, int value, size_t size, void* stream);
int cudaStreamCreateWithFlags(void** stream, unsigned flags);
int cudaStreamDestroy(void* stream);
int cudaStreamSynchronize(void* stream);
int cudaStreamWaitEvent(void* stream, void* event, unsigned flags);
int cudaStreamIsCapturing(void* stream, int* status);
int cudaThreadExchangeStreamCaptureMode(int* mode);
int cudaEventCreate(void** event);
int cudaEventDestroy(void* event);
int cudaEventRecord(void* event, void* stream);
int cudaEventQuery(void* event);
int cudaEventSynchronize(void* event);
int cudaEventElapsedTime(float* milliseconds, void* from, void* to);
int cudaDeviceGetAttribute(int* value, int attribute, int device);
}

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kDeinitialized = 4;
constexpr int kInvalidImage = 200, kInvalidContext = 201;
constexpr int kNoBinary = 209, kUnsupportedPtx = 222, kNotFound = 500;
constexpr int kMajor = 75, kMinor = 76;  // attributes: compute capability
constexpr int kAnyWay = 4;  // cudaMemcpyDefault

struct Function {
  std::string name;
  standin::Bind bind;
};

// A context is the address of a device's place here.
char contexts[64];

struct Copy2D {  // CUDA_MEMCPY2D
  size_t source_x, source_y;
  unsigned source_type;
  const void* source_host;
  const void* source;
  void* source_array;
  size_t source_pitch;
  size_t target_x, target_y;
  unsigned target_type;
  void* target_host;
  void* target;
  void* target_array;
  size_t target_pitch;
  size_t width, height;
};

}  // namespace

extern "C" {

int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = contexts + device;
  return kSuccess;
}
int cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }
int cuCtxSetCurrent(void* context) {
  const long device = static_cast<char*>(context) - contexts;
  if (device < 0 || device >= static_cast<long>(sizeof(contexts))) return kInvalidContext;
  return cudaSetDevice(static_cast<int>(device));
}
int cuCtxGetCurrent(void** context) {
  int device = 0;
  cudaGetDevice(&device);
  *context = contexts + device;
  return kSuccess;
}
int cuCtxGetDevice(int* device) { return cudaGetDevice(device); }

int cuMemAlloc_v2(void** address, size_t size) {
  return size == 0 ? kInvalidValue : cudaMalloc(address, size);
}
int cuMemFree_v2(void* address) { return cudaFree(address); }
int cuMemHostAlloc(void** address, size_t size, unsigned flags) {
  return cudaHostAlloc(address, size, flags);
}
int cuMemFreeHost(void* address) { return cudaFreeHost(address); }
int cuMemcpyAsync(void* to, const void* from, size_t size, void* stream) {
  return cudaMemcpyAsync(to, from, size, kAnyWay, stream);
}
int cuMemcpy2DAsync_v2(const Copy2D* copy, void* stream) {
  constexpr size_t kMaxPitch = 0x7fffffff;
  if (copy->source_pitch > kMaxPitch || copy->target_pitch > kMaxPitch) return kInvalidValue;
  return cudaMemcpy2DAsync(copy->target, copy->target_pitch, copy->source, copy->source_pitch,
                           copy->width, copy->height, kAnyWay, stream);
}
int cuMemsetD8Async(void* at, unsigned char value, size_t size, void* stream) {
  return cudaMemsetAsync(at, value, size, stream);
}

int cuStreamCreate(void** stream, unsigned flags) {
  return cudaStreamCreateWithFlags(stream, flags);
}
int cuStreamDestroy_v2(void* stream) { return cudaStreamDestroy(stream); }
int cuStreamSynchronize(void* stream) { return cudaStreamSynchronize(stream); }
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  return cudaStreamWaitEvent(stream, event, flags);
}
int cuStreamIsCapturing(void* stream, int* status) { return cudaStreamIsCapturing(stream, status); }
int cuThreadExchangeStreamCaptureMode(int* mode) {
  return cudaThreadExchangeStreamCaptureMode(mode);
}
int cuEventCreate(void** event, unsigned) { return cudaEventCreate(event); }
int cuEventDestroy_v2(void* event) { return cudaEventDestroy(event); }
int cuEventRecord(void* event, void* stream) { return cudaEventRecord(event, stream); }
int cuEventQuery(void* event) {
  return getenv("STANDIN_SHUT_DOWN") != nullptr ? kDeinitialized : cudaEventQuery(event);
}
int cuEventSynchronize(void* event) { return cudaEventSynchronize(event); }
int cuEventElapsedTime(float* milliseconds, void* from, void* to) {
  return cudaEventElapsedTime(milliseconds, from, to);
}

int cuModuleLoadData(void** module, const void* image) {
  // As NVRTC's stand-in writes it. Machine code runs where only the minor number is greater, and
  // PTX on all that is newer.
  const char* code = static_cast<const char*>(image);
  int made_for = 0, at = 0, device = 0, major = 0, minor = 0;
  const bool translated = sscanf(code, "compute_%d:%n", &made_for, &at) == 1 && at > 0;
  if (!translated && (sscanf(code, "sm_%d:%n", &made_for, &at) != 1 || at == 0)) {
    return kInvalidImage;
  }
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, kMajor, device);
  cudaDeviceGetAttribute(&minor, kMinor, device);
  if (made_for > 10 * major + minor || (!translated && made_for / 10 != major)) return kNoBinary;
  if (translated && getenv("STANDIN_OLD_DRIVER") != nullptr) return kUnsupportedPtx;
  standin_log("module", "%.*s", at - 1, code);
  *module = dlopen(code + at, RTLD_NOW | RTLD_LOCAL);
  return *module == nullptr ? kInvalidImage : kSuccess;
}
int cuModuleUnload(void*) { return kSuccess; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  void* entry = dlsym(module, (std::string("standin_bind_") + name).c_str());
  if (entry == nullptr) return kNotFound;
  *function = new Function{name, reinterpret_cast<standin::Bind>(entry)};
  return kSuccess;
}
int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned, void* stream,
                   void** arguments, void**) {
  static std::mutex one_at_a_time;
  const Function& kernel = *static_cast<Function*>(function);
  standin_log("launch", "%s\t%p", kernel.name.c_str(), stream);
  standin::compute(stream);
  // The arguments are the caller's again when this returns.
  std::shared_ptr<standin::Bound> bound(
      kernel.bind({grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, arguments));
  return standin::enqueue(stream, [bound] {
    std::lock_guard<std::mutex> lock(one_at_a_time);
    StandinAccess access;
    bound->run();
  });
}
}
