#include "kernels/device/queue.h"

#include <algorithm>
#include <list>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "abi/cuda_compiler.h"

namespace onnxpar::cuda {
namespace {

constexpr int kMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kMinor = 76;
constexpr unsigned kHostAllocMapped = 2;  // CU_MEMHOSTALLOC_DEVICEMAP
constexpr size_t kMostBlocks = 16384;
constexpr size_t kAlignment = 256;

// Modules stay loaded: kernels of other sessions may run, and CUDA graphs hold functions.
struct Loaded {
  Module module = nullptr;
  std::map<std::string, Function> functions;
};

struct Cache {
  std::mutex mutex;
  std::map<std::tuple<Context, std::string, DType>, Loaded> modules;
};
Cache& cache() {
  static auto* made = new Cache();
  return *made;
}

int capability() {
  int device = 0;
  check(driver().context_device(&device), "cuCtxGetDevice");
  int major = 0;
  int minor = 0;
  check(driver().device_attribute(&major, kMajor, device), "cuDeviceGetAttribute");
  check(driver().device_attribute(&minor, kMinor, device), "cuDeviceGetAttribute");
  return major * 10 + minor;
}

Function find(Context context, const char* source, DType element, const char* kernel) {
  Cache& c = cache();
  std::lock_guard lock(c.mutex);
  Loaded& loaded = c.modules[{context, source, element}];
  if (loaded.module == nullptr) {
    const Code code = compile(source, element, capability());
    check(driver().module_load(&loaded.module, code.image.c_str()),
          (std::string("cuModuleLoadData of ") + source).c_str(), code.advice.c_str());
  }
  Function& function = loaded.functions[kernel];
  if (function == nullptr) {
    check(driver().module_function(&function, loaded.module, kernel), kernel);
  }
  return function;
}

}  // namespace

class Workspace {
 public:
  std::mutex mutex;
  std::byte* data = nullptr;
  size_t size = 0;

  // The one of a stream, made at its first use.
  static Workspace& of(Context context, Stream stream) {
    static auto* mutex = new std::mutex();
    static auto* all = new std::map<std::pair<Context, Stream>, Workspace>();
    std::lock_guard lock(*mutex);
    return (*all)[{context, stream}];
  }

  // What was there is kept: kernels in the queue use it, and CUDA graphs hold its address. It is
  // made twice as large each time, so all together is at most twice what is needed.
  void grow(size_t least) {
    void* made = nullptr;
    const size_t bytes = std::max(least, 2 * size);
    check(driver().alloc(&made, bytes), "cuMemAlloc");
    data = static_cast<std::byte*>(made);
    size = bytes;
  }
};

Grid over(size_t count, size_t each) {
  Grid grid;
  const size_t threads = (count + each - 1) / each;
  grid.blocks = std::min(kMostBlocks, (threads + grid.threads - 1) / grid.threads);
  return grid;
}

Grid teams(size_t rows) { return {std::min(kMostBlocks, rows)}; }

Team team_for(size_t rows, size_t n) {
  constexpr size_t kShort = 1024;
  if (n > kShort) return {"_blocks", teams(rows)};
  return {"_warps", over(rows * 32)};
}

size_t pack(DType element) { return 16 / dtype_size(element); }
size_t real_size(DType element) {
  return element == DType::kFloat64 ? sizeof(double) : sizeof(float);
}

Queue::Queue(const Io& io, const char* source, DType element)
    : stream_(io.stream()), source_(source), element_(element) {
  check(driver().context_get(&context_), "cuCtxGetCurrent");
  if (context_ == nullptr) throw std::runtime_error("this thread has no CUDA context");
}

void Queue::enqueue(const char* kernel, const Grid& grid, void** arguments) {
  if (grid.blocks == 0 || grid.blocks_y == 0) return;
  const Function function = find(context_, source_, element_, kernel);
  check(driver().launch(function, static_cast<unsigned>(grid.blocks),
                        static_cast<unsigned>(grid.blocks_y), 1, grid.threads, grid.threads_y, 1,
                        0, stream_, arguments, nullptr),
        kernel);
}

void* Queue::bytes(size_t count) {
  if (workspace_ == nullptr) {
    workspace_ = &Workspace::of(context_, stream_);
    lock_ = std::unique_lock(workspace_->mutex);
  }
  const size_t rounded = (count + kAlignment - 1) / kAlignment * kAlignment;
  if (used_ + rounded > workspace_->size) {
    workspace_->grow(used_ + rounded);
    used_ = 0;
  }
  void* at = workspace_->data + used_;
  used_ += rounded;
  return at;
}

void Queue::zero(void* at, size_t size) {
  if (size != 0) check(driver().set_8(at, 0, size, stream_), "cuMemsetD8Async");
}

namespace {

Fault* new_fault() {
  constexpr size_t kFaults = 4096;
  static auto* mutex = new std::mutex();
  static Fault* page = nullptr;
  static size_t used = kFaults;
  std::lock_guard lock(*mutex);
  if (used == kFaults) {
    void* made = nullptr;
    check(driver().host_alloc(&made, kFaults * sizeof(Fault), kHostAllocPortable | kHostAllocMapped),
          "cuMemHostAlloc");
    page = static_cast<Fault*>(made);
    used = 0;
  }
  Fault* fault = page + used++;
  *fault = {0, 0};
  return fault;
}

// Of all sessions, in the order in which their nodes were made.
struct Reports {
  std::mutex mutex;
  std::list<FaultReport*> all;
};
Reports& reports() {
  static auto* made = new Reports();
  return *made;
}

}  // namespace

FaultReport::FaultReport(std::string where, const char* what, const char* kind)
    : where_(std::move(where)), what_(what), kind_(kind) {
  std::lock_guard lock(reports().mutex);
  reports().all.push_back(this);
}

FaultReport::~FaultReport() {
  std::lock_guard lock(reports().mutex);
  reports().all.remove(this);
}

Fault* FaultReport::next(Stream stream, size_t count) {
  std::lock_guard lock(reports().mutex);
  if (fault_ == nullptr) fault_ = new_fault();
  if (const std::string fault = take(); !fault.empty()) {
    throw std::invalid_argument(
        fault + "; found by " +
        (runs_ > 1 ? "one of the " + std::to_string(runs_) + " runs before" : "the run before"));
  }
  stream_ = stream;
  count_ = count;
  ++runs_;
  return fault_;
}

std::string FaultReport::take() {
  volatile Fault* const fault = fault_;
  if (fault == nullptr || fault->place == 0) return {};
  const std::string text = std::string(what_) + " " + std::to_string(fault->place - 1) + " is " +
                           std::to_string(fault->value) + ", expected one of " +
                           std::to_string(count_) + " " + kind_;
  fault->place = 0;
  return text;
}

void check_faults(Stream stream) {
  std::lock_guard lock(reports().mutex);
  for (FaultReport* report : reports().all) {
    if (report->stream_ != stream) continue;
    const size_t runs = std::exchange(report->runs_, 0);
    const std::string fault = report->take();
    if (fault.empty()) continue;
    throw std::invalid_argument(
        report->where_ + ": " + fault +
        (runs > 1 ? "; found by one of the last " + std::to_string(runs) + " runs" : ""));
  }
}

}  // namespace onnxpar::cuda
