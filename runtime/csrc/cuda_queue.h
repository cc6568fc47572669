// How operators launch kernels of device/*.cu: compiled once for each GPU and element type, and
// enqueued on the stream that onnxruntime hands the operator. The host never waits.
#pragma once

#include <memory>
#include <mutex>

#include "cuda_driver.h"
#include "ort_io.h"

namespace onnxpar::cuda {

// Indices on the device, as device/common.cuh has them.
using Index = long long;

struct Grid {
  size_t blocks = 0;
  size_t blocks_y = 1;
  unsigned threads = 256;
  unsigned threads_y = 1;
};

// Threads enough to give each `each` of `count` things, up to as many as fill any GPU: kernels loop.
Grid over(size_t count, size_t each = 1);
// A block for each of `rows`, up to as many as fill any GPU.
Grid teams(size_t rows);
// How rows of `n` elements are dealt out: a warp for each where they are short, else a block. The
// suffix is that of the kernels' names.
struct Team {
  const char* suffix;
  Grid grid;
};
Team team_for(size_t rows, size_t n);
// Elements of the type that a thread moves at a time.
size_t pack(DType element);

// Memory that operators on one stream use one after the other.
class Workspace;

// What one call of an operator enqueues. While one lives no other thread enqueues on the stream
// what uses scratch memory.
class Queue {
 public:
  // Throws std::runtime_error where there is no GPU, driver or compiler.
  Queue(const Io& io, const char* source, DType element);

  // Launches a kernel of the source; nothing where the grid is empty. The arguments must have the
  // very types of the kernel's parameters.
  template <class... Args>
  void launch(const char* kernel, const Grid& grid, Args... args) {
    void* pointers[] = {static_cast<void*>(&args)...};
    enqueue(kernel, grid, pointers);
  }

  // Memory of the device for `count` things, with undefined contents, until the call ends.
  template <class T>
  T* scratch(size_t count) {
    return static_cast<T*>(bytes(count * sizeof(T)));
  }
  void zero(void* at, size_t size);

 private:
  void enqueue(const char* kernel, const Grid& grid, void** arguments);
  void* bytes(size_t count);

  Context context_ = nullptr;
  Stream stream_ = nullptr;
  const char* source_;
  DType element_;
  Workspace* workspace_ = nullptr;
  std::unique_lock<std::mutex> lock_;
  size_t used_ = 0;
};

// device/common.cuh's Fault: a value that no result can be made from, told by a kernel into memory
// of the host. Since nobody waits for the kernel, it is an error of the node's next call.
struct alignas(16) Fault {
  Index place;
  Index value;
};

// One for each node. Its memory is never used again, since a kernel may still write it.
class FaultReport {
 public:
  // Needs a current context.
  Fault* get();
  // The fault that has been told since the last call; place is 0 where there is none.
  Fault take();

 private:
  std::once_flag made_;
  Fault* fault_ = nullptr;
};

}  // namespace onnxpar::cuda
