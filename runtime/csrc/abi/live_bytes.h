// The bytes that onnxruntime's sessions hold on the CPU, counted.
//
// Sessions made while a LiveBytes is installed take all their memory from it: weights, values between
// nodes, outputs and the working memory of kernels. It allocates exactly the requested size and frees
// memory at once. So its peak is that of the live bytes, and not that of an arena, whose blocks are
// larger than their contents.
#pragma once

#include <atomic>
#include <cstdint>

#include "abi/ort_abi.h"

namespace onnxpar {

// Sessions and their values keep a pointer to it, and it is not known when the last of them ends; so
// none is ever freed (a few bytes each).
class LiveBytes : public ort::Allocator {
 public:
  LiveBytes();
  LiveBytes(const LiveBytes&) = delete;
  LiveBytes& operator=(const LiveBytes&) = delete;

  // Makes it the allocator of the CPU for new sessions that use the environment's allocators
  // (session.use_env_allocators). Throws std::runtime_error if another is installed.
  void install();
  void uninstall();

  int64_t live() const { return live_; }
  // The most since the last reset.
  int64_t peak() const { return peak_; }
  void reset() { peak_ = live_.load(); }

 private:
  void* take(size_t bytes);
  void give(void* memory);

  ort::Env* env_ = nullptr;
  ort::MemoryInfo* info_ = nullptr;
  std::atomic<int64_t> live_{0};
  std::atomic<int64_t> peak_{0};
};

}  // namespace onnxpar
