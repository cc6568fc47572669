// Copies, and memory of the GPU besides that which onnxruntime gives to kernels.
#pragma once

#include "abi/cuda_driver.h"

namespace onnxpar::cuda {

// A buffer, on the device or in pinned host memory, that grows as needed.
class Slab {
 public:
  enum class Kind { kDevice, kPinned };
  explicit Slab(Kind kind = Kind::kDevice) : kind_(kind) {}
  ~Slab();
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;
  // At least `bytes` of memory. To grow, it waits for the stream's work on it, and loses its contents.
  std::byte* get(size_t bytes, Stream stream);
  size_t size() const { return size_; }

 private:
  const Kind kind_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

void copy(void* to, const void* from, size_t bytes, Stream stream);
// `rows` rows of `width` bytes, whose starts are `to_pitch` and `from_pitch` bytes apart.
void copy_rows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
               size_t rows, Stream stream);

}  // namespace onnxpar::cuda
