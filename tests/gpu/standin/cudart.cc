// A CUDA runtime without a GPU: devices, and kernels, which take their turn on streams and compute nothing,
// but for those in provider_kernels.cc. Memory is in memory.cc, time in streams.cc. What is not here returns
// success and is generated (see libraries.py).
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "device.h"
#include "provider_kernels.h"
#include "streams.h"

namespace {

constexpr int kSuccess = 0, kInvalidDevice = 101;
constexpr int kVersion = 13000;

long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text != nullptr && *text != 0 ? strtol(text, nullptr, 10) : otherwise;
}

struct Functions {
  std::mutex mutex;
  std::map<const void*, const char*> names;
};

Functions& functions() {
  static Functions* const the = new Functions;
  return *the;
}

const char* name_of(const void* function) {
  std::lock_guard<std::mutex> lock(functions().mutex);
  auto const at = functions().names.find(function);
  return at == functions().names.end() ? "?" : at->second;
}

thread_local int current = 0;

void* handle() { return calloc(1, 64); }

template <typename T>
void put(void* at, size_t offset, T value) {
  memcpy(static_cast<char*>(at) + offset, &value, sizeof value);
}

}  // namespace

struct Dim3 {
  unsigned x, y, z;
};

struct LaunchConfig {  // cudaLaunchConfig_t, as far as it is read
  Dim3 grid, block;
  size_t shared;
  void* stream;
};

struct Call {
  Dim3 grid, block;
  size_t shared;
  void* stream;
};

static thread_local Call pushed;

extern "C" {

int cudaMemGetInfo(size_t* left, size_t* total);

void standin_log(const char* word, const char* format, ...) {
  static FILE* const file = [] {
    const char* name = getenv("STANDIN_LOG");
    return name == nullptr ? nullptr : fopen(name, "a");
  }();
  if (file == nullptr) return;
  char text[1024];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  fprintf(file, "%s\t%s\n", word, text);
  fflush(file);
}

// Devices.
int cudaGetDeviceCount(int* count) {
  *count = static_cast<int>(setting("STANDIN_DEVICES", 1));
  return kSuccess;
}
int cudaGetDevice(int* device) {
  *device = current;
  return kSuccess;
}
int cudaSetDevice(int device) {
  if (device < 0 || device >= setting("STANDIN_DEVICES", 1)) return kInvalidDevice;
  current = device;
  return kSuccess;
}
int cudaRuntimeGetVersion(int* version) {
  *version = kVersion;
  return kSuccess;
}
int cudaDriverGetVersion(int* version) {
  *version = kVersion;
  return kSuccess;
}
int cudaGetDeviceProperties(void* properties, int device) {  // offsets of CUDA 13's cudaDeviceProp
  memset(properties, 0, 1008);
  snprintf(static_cast<char*>(properties), 256, "Stand-in device %d", device);
  size_t left = 0, total = 0;
  cudaMemGetInfo(&left, &total);
  put<size_t>(properties, 288, total);      // totalGlobalMem
  put<size_t>(properties, 296, 49152);      // sharedMemPerBlock
  put<int>(properties, 304, 65536);         // regsPerBlock
  put<int>(properties, 308, 32);            // warpSize
  put<int>(properties, 320, 1024);          // maxThreadsPerBlock
  for (size_t axis = 0; axis < 3; ++axis) {
    put<int>(properties, 324 + 4 * axis, axis == 2 ? 64 : 1024);           // maxThreadsDim
    put<int>(properties, 336 + 4 * axis, axis == 0 ? 2147483647 : 65535);  // maxGridSize
  }
  put<size_t>(properties, 352, 65536);                                       // totalConstMem
  put<int>(properties, 360, static_cast<int>(setting("STANDIN_CC", 90) / 10));  // major
  put<int>(properties, 364, static_cast<int>(setting("STANDIN_CC", 90) % 10));  // minor
  put<int>(properties, 384, 132);            // multiProcessorCount
  put<int>(properties, 568, device + 1);     // pciBusID
  put<int>(properties, 596, 50 << 20);       // l2CacheSize
  put<int>(properties, 604, 2048);           // maxThreadsPerMultiProcessor
  put<size_t>(properties, 624, 233472);      // sharedMemPerMultiprocessor
  put<int>(properties, 632, 65536);          // regsPerMultiprocessor
  put<size_t>(properties, 672, 232448);      // sharedMemPerBlockOptin
  put<int>(properties, 688, 32);             // maxBlocksPerMultiProcessor
  put<int>(properties, 720, 1);              // memoryPoolsSupported
  return kSuccess;
}
int cudaDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {  // cudaDeviceAttr
    case 1: *value = 1024; break;
    case 8: *value = 49152; break;
    case 10: *value = 32; break;
    case 12: *value = 65536; break;
    case 16: *value = 132; break;
    case 38: *value = 50 << 20; break;
    case 39: *value = 2048; break;
    case 75: *value = static_cast<int>(setting("STANDIN_CC", 90) / 10); break;
    case 76: *value = static_cast<int>(setting("STANDIN_CC", 90) % 10); break;
    case 81: *value = 233472; break;
    case 97: *value = 232448; break;
    case 106: *value = 32; break;
    case 115: *value = 1; break;
    default: *value = 0;
  }
  return kSuccess;
}
const char* cudaGetErrorName(int error) {
  return error == kSuccess ? "cudaSuccess" : "cudaErrorStandin";
}
const char* cudaGetErrorString(int error) {
  switch (error) {
    case kSuccess: return "no error";
    case 1: return "invalid argument";
    case 2: return "out of memory";
    case kInvalidDevice: return "invalid device ordinal";
    case 600: return "device not ready";
    case 900: return "operation not permitted when stream is capturing";
    case 901: return "operation failed due to a previous error during capture";
    case 904: return "capturing stream has unjoined work";
    case 905: return "dependency created on uncaptured work in another stream";
    case 906: return "operation would make the legacy stream depend on a capturing blocking stream";
    case 907: return "operation not permitted on an event last recorded in a capturing stream";
    default: return "error of the stand-in";
  }
}

// Kernels: known by name.
void** __cudaRegisterFatBinary(void*) { return static_cast<void**>(handle()); }
void __cudaUnregisterFatBinary(void** binary) { free(binary); }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*,
                            void*, void*, int*) {
  std::lock_guard<std::mutex> lock(functions().mutex);
  functions().names[host] = name;
}
int __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return kSuccess;
}
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void* stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
int __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared, void** stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *stream = pushed.stream;
  return kSuccess;
}
int cudaLaunchKernel(const void* function, Dim3, Dim3, void** arguments, size_t, void* stream) {
  const char* const name = name_of(function);
  standin_log("launch", "%s\t%p", name, stream);
  standin::compute(stream);
  return standin::enqueue(stream, standin::provider_kernel(name, arguments));
}
int __cudaLaunchKernel(const void* function, Dim3 grid, Dim3 block, void** arguments, size_t shared,
                       void* stream) {
  return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}
int cudaLaunchCooperativeKernel(const void* function, Dim3 grid, Dim3 block, void** arguments,
                                size_t shared, void* stream) {
  return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}
int cudaLaunchKernelExC(const LaunchConfig* config, const void* function, void** arguments) {
  return cudaLaunchKernel(function, config->grid, config->block, arguments, config->shared,
                          config->stream);
}
int cudaFuncGetAttributes(void* attributes, const void*) {
  memset(attributes, 0, 144);
  put<int>(attributes, 24, 1024);  // maxThreadsPerBlock
  put<int>(attributes, 28, 32);    // numRegs
  put<int>(attributes, 32, static_cast<int>(setting("STANDIN_CC", 90)));  // ptxVersion
  put<int>(attributes, 36, static_cast<int>(setting("STANDIN_CC", 90)));  // binaryVersion
  return kSuccess;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                           unsigned) {
  *blocks = 2;
  return kSuccess;
}
int cudaLibraryLoadData(void** library, const void*, void*, void**, unsigned, void*, void**,
                        unsigned) {
  *library = handle();
  return kSuccess;
}
int cudaLibraryUnload(void* library) {
  free(library);
  return kSuccess;
}
int cudaLibraryGetKernel(void** kernel, void*, const char*) {
  static char the;
  *kernel = &the;
  return kSuccess;
}

static int nothing(void) { return kSuccess; }
int cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                     int* status) {
  *function = reinterpret_cast<void*>(&nothing);
  if (status != nullptr) *status = 0;
  return kSuccess;
}
}
