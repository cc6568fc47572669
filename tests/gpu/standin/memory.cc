// Memory of a stand-in device, which is the host's, and copies, which are real.
//
// Memory is zero when new, and what was freed is overwritten (kPoison) when the device comes to it. As
// the CUDA Runtime API's "API synchronization behavior" says, a copy from host memory that is not pinned
// has read it when the call returns, and one to such memory is complete; one from or to pinned memory
// happens when its stream comes there.
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "device.h"
#include "streams.h"

extern "C" int cudaGetDevice(int* device);

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kTotal = size_t{64} << 30;     // reserved addresses; pages come when they are touched
constexpr size_t kMostPoisoned = size_t{16} << 20;
constexpr int kPoison = 0xff;                   // a NaN in any type of numbers with a point
constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2;
constexpr int kHostToDevice = 1, kDeviceToHost = 2;       // cudaMemcpyKind
constexpr int kUnregistered = 0, kHost = 1, kDevice = 2;  // cudaMemoryType

struct Memory {
  std::mutex mutex;
  char* base = nullptr;
  bool guard = false;
  int open = 0;
  size_t used = 0;
  std::map<size_t, size_t> free;  // offset to size
  std::map<size_t, size_t> live;
  std::map<const char*, size_t> pinned;

  Memory() {
    const char* text = getenv("STANDIN_GUARD");
    guard = text != nullptr && atoi(text) != 0;
    void* got = mmap(nullptr, kTotal, guard ? PROT_NONE : PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) abort();
    base = static_cast<char*>(got);
    free[0] = kTotal;
  }
  void* allocate(size_t size) {
    size_t const rounded = size == 0 ? kPage : (size + kPage - 1) / kPage * kPage;
    std::lock_guard<std::mutex> lock(mutex);
    for (auto at = free.begin(); at != free.end(); ++at) {
      if (at->second < rounded) continue;
      size_t const offset = at->first, left = at->second - rounded;
      free.erase(at);
      if (left != 0) free[offset + rounded] = left;
      live[offset] = rounded;
      used += rounded;
      madvise(base + offset, rounded, MADV_DONTNEED);  // zeros
      return base + offset;
    }
    return nullptr;
  }
  bool is_live(void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    return live.count(static_cast<size_t>(static_cast<char*>(address) - base)) != 0;
  }
  void release(void* address) {
    StandinAccess access;
    std::lock_guard<std::mutex> lock(mutex);
    auto const at = live.find(static_cast<size_t>(static_cast<char*>(address) - base));
    if (at == live.end()) return;
    size_t offset = at->first, size = at->second;
    memset(address, kPoison, size < kMostPoisoned ? size : kMostPoisoned);
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
        return;
      }
    }
    free[offset] = size;
  }
  bool holds(const void* address) const {
    auto const at = static_cast<const char*>(address);
    return at >= base && at < base + kTotal;
  }
  bool is_pinned(const void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    auto const after = pinned.upper_bound(static_cast<const char*>(address));
    if (after == pinned.begin()) return false;
    auto const at = std::prev(after);
    return static_cast<const char*>(address) < at->first + at->second;
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

struct Rows {  // of `width` bytes
  void* to;
  size_t to_pitch;
  const void* from;
  size_t from_pitch, width, height;

  void move() const {
    StandinAccess access;
    for (size_t row = 0; row < height; ++row) {
      memmove(static_cast<char*>(to) + row * to_pitch,
              static_cast<const char*>(from) + row * from_pitch, width);
    }
  }
};

int copy(Rows rows, int kind, void* stream, bool waits) {
  bool const from_host = !standin_is_device(rows.from), to_host = !standin_is_device(rows.to);
  bool const down = !from_host && to_host, up = from_host && !to_host;
  if ((kind == kHostToDevice && down) || (kind == kDeviceToHost && up)) return kInvalidValue;
  standin_log("memcpy", "%s\t%zu\t%p\t%s", up ? "HtoD" : down ? "DtoH" : "same",
              rows.width * rows.height, stream, waits ? "waits" : "async");
  bool const pageable = (from_host && !memory().is_pinned(rows.from)) ||
                        (to_host && !memory().is_pinned(rows.to));
  if (up && pageable && !standin::is_captured(stream)) {
    auto const staged = std::make_shared<std::vector<char>>(rows.width * rows.height);
    Rows{staged->data(), rows.width, rows.from, rows.from_pitch, rows.width, rows.height}.move();
    Rows const rest{rows.to, rows.to_pitch, staged->data(), rows.width, rows.width, rows.height};
    return standin::enqueue(stream, [staged, rest] { rest.move(); });
  }
  // A graph reads and writes host memory when it is launched.
  bool const complete = (waits && (from_host || to_host)) || (from_host && to_host) ||
                        (pageable && !standin::is_captured(stream));
  standin::Work work = [rows] { rows.move(); };
  return complete ? standin::enqueue_and_wait(stream, work) : standin::enqueue(stream, work);
}

int set(void* at, int value, size_t size, void* stream) {
  return standin::enqueue(stream, [=] {
    StandinAccess access;
    memset(at, value, size);
  });
}

int allocate(void** address, size_t size) {
  *address = memory().allocate(size);
  standin_log("malloc", "%zu", size);
  return *address == nullptr ? kOutOfMemory : kSuccess;
}

// Ends what CUDA may make wait for all that the device does.
int halt(const char* call) {
  if (int const result = standin::forbidden(call)) return result;
  if (getenv("STANDIN_ALLOCATION_WAITS") != nullptr) standin::wait_for_device();
  return kSuccess;
}

template <typename T>
void put(void* at, size_t offset, T value) {
  memcpy(static_cast<char*>(at) + offset, &value, sizeof value);
}

}  // namespace

extern "C" {

int standin_is_device(const void* address) { return memory().holds(address) ? 1 : 0; }
void standin_open(void) { memory().protect(1); }
void standin_close(void) { memory().protect(-1); }

int cudaMalloc(void** address, size_t size) {
  int const result = halt("cudaMalloc");
  return result != kSuccess ? result : allocate(address, size);
}
int cudaFree(void* address) {
  if (address == nullptr) return kSuccess;
  if (!memory().is_live(address)) return kInvalidValue;
  if (int const result = standin::forbidden("cudaFree")) return result;
  standin::wait_for_device();
  memory().release(address);
  return kSuccess;
}
int cudaMallocAsync(void** address, size_t size, void*) { return allocate(address, size); }
int cudaMallocFromPoolAsync(void** address, size_t size, void*, void*) {
  return allocate(address, size);
}
int cudaFreeAsync(void* address, void* stream) {
  if (address == nullptr) return kSuccess;
  if (!memory().is_live(address)) return kInvalidValue;
  return standin::enqueue(stream, [address] { memory().release(address); });
}
int cudaHostAlloc(void** address, size_t size, unsigned) {
  if (int const result = halt("cudaHostAlloc")) return result;
  size_t const rounded = (size + kPage) / kPage * kPage;
  *address = aligned_alloc(kPage, rounded);
  if (*address == nullptr) return kOutOfMemory;
  memset(*address, 0, size);
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().pinned[static_cast<char*>(*address)] = rounded;
  standin_log("pinned", "%zu", size);
  return kSuccess;
}
int cudaMallocHost(void** address, size_t size) { return cudaHostAlloc(address, size, 0); }
// CUDA does not say that it waits for copies, so it does not. The memory is never used again.
int cudaFreeHost(void* address) {
  if (address == nullptr) return kSuccess;
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto const at = memory().pinned.find(static_cast<char*>(address));
  if (at == memory().pinned.end()) return kInvalidValue;
  memset(address, kPoison, at->second);
  return kSuccess;
}
int cudaMemGetInfo(size_t* left, size_t* total) {
  *total = kTotal;
  *left = kTotal - memory().used;
  return kSuccess;
}
int cudaMemcpy(void* to, const void* from, size_t size, int kind) {
  return copy({to, size, from, size, size, 1}, kind, nullptr, true);
}
int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
  return copy({to, size, from, size, size, 1}, kind, stream, false);
}
int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                      size_t height, int kind, void* stream) {
  return copy({to, to_pitch, from, from_pitch, width, height}, kind, stream, false);
}
int cudaMemcpyFromSymbol(void* to, const void*, size_t size, size_t, int) {
  memset(to, 0, size);
  return kSuccess;
}
int cudaMemset(void* at, int value, size_t size) { return set(at, value, size, nullptr); }
int cudaMemsetAsync(void* at, int value, size_t size, void* stream) {
  standin_log("memset", "%zu\t%p", size, stream);
  return set(at, value, size, stream);
}
int cudaPointerGetAttributes(void* attributes, const void* address) {
  bool const device = memory().holds(address);
  int current = 0;
  cudaGetDevice(&current);
  put<int>(attributes, 0, device ? kDevice : memory().is_pinned(address) ? kHost : kUnregistered);
  put<int>(attributes, 4, device ? current : -1);
  put<const void*>(attributes, 8, device ? address : nullptr);
  put<const void*>(attributes, 16, device ? nullptr : address);
  return kSuccess;
}
int cudaMemPoolCreate(void** pool, const void*) {
  *pool = calloc(1, 64);
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
}
