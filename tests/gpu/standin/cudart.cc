// A CUDA runtime without a GPU: memory is the host's, streams do everything at once, kernels are
// only counted. What is not here returns success and is generated (see libraries.py).
//
// Environment: STANDIN_DEVICES (how many devices, 1), STANDIN_GUARD=1 (touching device memory from
// the host is a segmentation fault, as on a GPU), STANDIN_LOG (a file that gets a line a call),
// STANDIN_CC (compute capability, 90).
#include <sys/mman.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "device.h"

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kTotal = size_t{64} << 30;  // reserved addresses; pages come when they are touched
constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101;
constexpr int kHostToDevice = 1, kDeviceToHost = 2;  // cudaMemcpyKind
constexpr int kVersion = 13000;

long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text != nullptr && *text != 0 ? strtol(text, nullptr, 10) : otherwise;
}

struct Memory {
  std::mutex mutex;
  char* base = nullptr;
  bool guard = false;
  int open = 0;
  size_t used = 0;
  std::map<size_t, size_t> free;  // offset to size
  std::map<size_t, size_t> live;

  Memory() {
    guard = setting("STANDIN_GUARD", 0) != 0;
    void* got = mmap(nullptr, kTotal, guard ? PROT_NONE : PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) abort();
    base = static_cast<char*>(got);
    free[0] = kTotal;
  }
  void* allocate(size_t size) {
    size_t const whole = size == 0 ? kPage : (size + kPage - 1) / kPage * kPage;
    std::lock_guard<std::mutex> lock(mutex);
    for (auto at = free.begin(); at != free.end(); ++at) {
      if (at->second < whole) continue;
      size_t const offset = at->first, left = at->second - whole;
      free.erase(at);
      if (left != 0) free[offset + whole] = left;
      live[offset] = whole;
      used += whole;
      return base + offset;
    }
    return nullptr;
  }
  bool release(void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    auto const at = live.find(static_cast<size_t>(static_cast<char*>(address) - base));
    if (at == live.end()) return false;
    size_t offset = at->first, size = at->second;
    madvise(address, size, MADV_DONTNEED);  // zeros again
    live.erase(at);
    used -= size;
    auto next = free.lower_bound(offset);
    if (next != free.end() && next->first == offset + size) {
      size += next->second;
      next = free.erase(next);
    }
    if (next != free.begin()) {
      auto const before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += size;
        return true;
      }
    }
    free[offset] = size;
    return true;
  }
  bool holds(const void* address) const {
    auto const at = static_cast<const char*>(address);
    return at >= base && at < base + kTotal;
  }
  void protect(int change) {
    if (!guard) return;
    std::lock_guard<std::mutex> lock(mutex);
    int const before = open;
    open += change;
    if ((before == 0) != (open == 0))
      mprotect(base, kTotal, open == 0 ? PROT_NONE : PROT_READ | PROT_WRITE);
  }
};

Memory& memory() {
  static Memory* const the = new Memory;  // never taken down: libraries free late
  return *the;
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

int copy(void* to, const void* from, size_t size, int kind, const void* stream, const char* how) {
  bool const down = standin_is_device(from) && !standin_is_device(to);
  bool const up = !standin_is_device(from) && standin_is_device(to);
  if ((kind == kHostToDevice && down) || (kind == kDeviceToHost && up)) return kInvalidValue;
  standin_log("memcpy", "%s\t%zu\t%p\t%s", up ? "HtoD" : down ? "DtoH" : "same", size, stream, how);
  StandinAccess access;
  memmove(to, from, size);
  return kSuccess;
}

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

int standin_is_device(const void* address) { return memory().holds(address) ? 1 : 0; }
void standin_open(void) { memory().protect(1); }
void standin_close(void) { memory().protect(-1); }

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
  put<size_t>(properties, 288, kTotal);     // totalGlobalMem
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
    case kInvalidValue: return "invalid argument";
    case kOutOfMemory: return "out of memory";
    case kInvalidDevice: return "invalid device ordinal";
    default: return "error of the stand-in";
  }
}

// Memory.
int cudaMalloc(void** address, size_t size) {
  *address = memory().allocate(size);
  standin_log("malloc", "%zu", size);
  return *address == nullptr ? kOutOfMemory : kSuccess;
}
int cudaFree(void* address) {
  return address == nullptr || memory().release(address) ? kSuccess : kInvalidValue;
}
int cudaMallocAsync(void** address, size_t size, void*) { return cudaMalloc(address, size); }
int cudaMallocFromPoolAsync(void** address, size_t size, void*, void*) {
  return cudaMalloc(address, size);
}
int cudaFreeAsync(void* address, void*) { return cudaFree(address); }
int cudaHostAlloc(void** address, size_t size, unsigned) {
  *address = aligned_alloc(kPage, (size + kPage) / kPage * kPage);
  if (*address == nullptr) return kOutOfMemory;
  memset(*address, 0, size);
  standin_log("pinned", "%zu", size);
  return kSuccess;
}
int cudaMallocHost(void** address, size_t size) { return cudaHostAlloc(address, size, 0); }
int cudaFreeHost(void* address) {
  free(address);
  return kSuccess;
}
int cudaMemGetInfo(size_t* left, size_t* total) {
  *total = kTotal;
  *left = kTotal - memory().used;
  return kSuccess;
}
int cudaMemcpy(void* to, const void* from, size_t size, int kind) {
  return copy(to, from, size, kind, nullptr, "waits");
}
int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
  return copy(to, from, size, kind, stream, "async");
}
int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                      size_t height, int kind, void* stream) {
  for (size_t row = 0; row < height; ++row) {
    int const got = copy(static_cast<char*>(to) + row * to_pitch,
                         static_cast<const char*>(from) + row * from_pitch, width, kind, stream,
                         "async");
    if (got != kSuccess) return got;
  }
  return kSuccess;
}
int cudaMemcpyFromSymbol(void* to, const void*, size_t size, size_t, int) {
  memset(to, 0, size);
  return kSuccess;
}
int cudaMemset(void* at, int value, size_t size) {
  StandinAccess access;
  memset(at, value, size);
  return kSuccess;
}
int cudaMemsetAsync(void* at, int value, size_t size, void* stream) {
  standin_log("memset", "%zu\t%p", size, stream);
  return cudaMemset(at, value, size);
}
int cudaPointerGetAttributes(void* attributes, const void* address) {
  bool const device = memory().holds(address);
  put<int>(attributes, 0, device ? 2 : 0);  // cudaMemoryTypeDevice, cudaMemoryTypeUnregistered
  put<int>(attributes, 4, device ? current : -1);
  put<const void*>(attributes, 8, device ? address : nullptr);
  put<const void*>(attributes, 16, device ? nullptr : address);
  return kSuccess;
}
int cudaMemPoolCreate(void** pool, const void*) {
  *pool = handle();
  return kSuccess;
}
int cudaMemPoolDestroy(void* pool) {
  free(pool);
  return kSuccess;
}
int cudaDeviceGetDefaultMemPool(void** pool, int) {
  static char the;
  *pool = &the;
  return kSuccess;
}
int cudaMemPoolGetAttribute(void*, int, void* value) {
  put<uint64_t>(value, 0, 0);
  return kSuccess;
}

// Streams, events, graphs: everything has happened when a call returns.
int cudaStreamCreate(void** stream) {
  *stream = handle();
  return kSuccess;
}
int cudaStreamCreateWithFlags(void** stream, unsigned) { return cudaStreamCreate(stream); }
int cudaStreamCreateWithPriority(void** stream, unsigned, int) { return cudaStreamCreate(stream); }
int cudaStreamDestroy(void* stream) {
  free(stream);
  return kSuccess;
}
int cudaStreamSynchronize(void* stream) {
  standin_log("synchronize", "%p", stream);
  return kSuccess;
}
int cudaDeviceSynchronize(void) {
  standin_log("synchronize", "device");
  return kSuccess;
}
int cudaStreamIsCapturing(void*, int* status) {
  *status = 0;
  return kSuccess;
}
int cudaThreadExchangeStreamCaptureMode(int* mode) {
  thread_local int own = 0;  // cudaStreamCaptureModeGlobal
  standin_log("mode", "%d", *mode);
  std::swap(own, *mode);
  return kSuccess;
}
int cudaStreamBeginCapture(void* stream, int mode) {
  standin_log("capture", "%p\t%d", stream, mode);
  return kSuccess;
}
int cudaStreamEndCapture(void*, void** graph) {
  *graph = handle();
  return kSuccess;
}
int cudaGraphInstantiate(void** exec, void*, unsigned long long) {
  *exec = handle();
  return kSuccess;
}
int cudaGraphDestroy(void* graph) {
  free(graph);
  return kSuccess;
}
int cudaGraphExecDestroy(void* exec) {
  free(exec);
  return kSuccess;
}
int cudaGraphLaunch(void*, void* stream) {
  standin_log("graph", "%p", stream);
  return kSuccess;
}
int cudaEventCreate(void** event) {
  *event = handle();
  return kSuccess;
}
int cudaEventCreateWithFlags(void** event, unsigned) { return cudaEventCreate(event); }
int cudaEventDestroy(void* event) {
  free(event);
  return kSuccess;
}
int cudaEventSynchronize(void*) {
  standin_log("synchronize", "event");
  return kSuccess;
}
int cudaEventElapsedTime(float* milliseconds, void*, void*) {
  *milliseconds = 0;
  return kSuccess;
}
int cudaLaunchHostFunc(void*, void (*function)(void*), void* data) {
  function(data);
  return kSuccess;
}

// Kernels: known by name, launched into nothing.
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
int cudaLaunchKernel(const void* function, Dim3, Dim3, void**, size_t, void* stream) {
  standin_log("launch", "%s\t%p", name_of(function), stream);
  return kSuccess;
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
