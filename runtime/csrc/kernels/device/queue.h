// How operators launch kernels of the .cu files: compiled once for each GPU and element type, and
// enqueued on the stream that onnxruntime hands the operator. The host never waits.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "abi/cuda_driver.h"
#include "abi/ort_io.h"
#include "kernels/device/types.cuh"

namespace onnxpar::cuda {

struct Grid {
  size_t blocks = 0;
  size_t blocks_y = 1;
  unsigned threads = kTeamThreads;
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
// Bytes of the type that elements of this one are computed in.
size_t real_size(DType element);

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

// What the kernels of one node tell. Nobody waits for a kernel, so it is an error of whoever has waited
// for the stream (check_faults), or else of the node's next run. Its memory is never used again, since
// a kernel may still write it.
class FaultReport {
 public:
  // "`where`: `what` 3 is 12, expected one of 10 `kind`".
  FaultReport(std::string where, const char* what, const char* kind);
  ~FaultReport();
  FaultReport(const FaultReport&) = delete;
  FaultReport& operator=(const FaultReport&) = delete;
  // Where kernels of a run that is enqueued on the stream tell of a value that is none of `count`.
  // Throws std::invalid_argument where those of an earlier run have. Needs a current context.
  Fault* next(Stream stream, size_t count);

 private:
  friend void check_faults(Stream stream);
  // What was reported since the last time, or nothing.
  std::string take();

  const std::string where_;
  const char* const what_;
  const char* const kind_;
  Fault* fault_ = nullptr;
  Stream stream_ = nullptr;
  size_t count_ = 0;
  size_t runs_ = 0;  // since the stream was waited for
};

// Throws std::invalid_argument where kernels on the stream, which has been waited for, have reported a
// fault.
void check_faults(Stream stream);

}  // namespace onnxpar::cuda
