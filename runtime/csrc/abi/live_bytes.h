// The bytes that onnxruntime's sessions hold on the CPU, counted.
//
// Sessions made while a LiveBytes is installed take all their memory from it: weights, values between
// nodes, outputs and the working memory of kernels. It allocates exactly the requested size and frees
// memory at once. So its peak is that of the live bytes, and not that of an arena, whose blocks are
// larger than their contents.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

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
  // Counts bytes that something else has allocated, or freed if they are negative.
  void count(int64_t bytes) {
    const int64_t now = live_ += bytes;
    int64_t most = peak_;
    while (most < now && !peak_.compare_exchange_weak(most, now)) {
    }
  }

 private:
  void* take(size_t bytes);
  void give(void* memory);

  ort::Env* env_ = nullptr;
  ort::MemoryInfo* info_ = nullptr;
  std::atomic<int64_t> live_{0};
  std::atomic<int64_t> peak_{0};
};

// Memory that no session has allocated, and which counts as if one had, if there is a counter.
class CountedBytes {
 public:
  CountedBytes() = default;
  CountedBytes(size_t bytes, LiveBytes* counter)
      : data_(new std::byte[bytes]), bytes_(bytes), counter_(counter) {
    count(static_cast<int64_t>(bytes_));
  }
  CountedBytes(CountedBytes&& other) noexcept { swap(other); }
  CountedBytes& operator=(CountedBytes&& other) noexcept {
    swap(other);
    return *this;
  }
  ~CountedBytes() { count(-static_cast<int64_t>(bytes_)); }

  std::byte* get() const { return data_.get(); }
  size_t size() const { return bytes_; }

 private:
  void count(int64_t bytes) {
    if (counter_ != nullptr) counter_->count(bytes);
  }
  void swap(CountedBytes& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(counter_, other.counter_);
  }

  std::unique_ptr<std::byte[]> data_;
  size_t bytes_ = 0;
  LiveBytes* counter_ = nullptr;
};

}  // namespace onnxpar
