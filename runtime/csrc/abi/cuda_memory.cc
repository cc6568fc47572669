#include "abi/cuda_memory.h"

#include <limits>

namespace onnxpar::cuda {

Slab::~Slab() {
  if (data_ == nullptr) return;
  if (kind_ == Kind::kDevice) driver().free(data_);
  if (kind_ == Kind::kPinned) driver().host_free(data_);
}

std::byte* Slab::get(size_t bytes, Stream stream) {
  if (bytes <= size_) return data_;
  if (data_ != nullptr) {
    check(driver().stream_synchronize(stream), "cuStreamSynchronize");
    const int result =
        kind_ == Kind::kDevice ? driver().free(data_) : driver().host_free(data_);
    data_ = nullptr;
    size_ = 0;
    check(result, "cuMemFree");
  }
  void* made = nullptr;
  if (kind_ == Kind::kDevice) {
    check(driver().alloc(&made, bytes), "cuMemAlloc");
  } else {
    check(driver().host_alloc(&made, bytes, kHostAllocPortable), "cuMemHostAlloc");
  }
  data_ = static_cast<std::byte*>(made);
  size_ = bytes;
  return data_;
}

void copy(void* to, const void* from, size_t bytes, Stream stream) {
  if (bytes != 0) check(driver().copy(to, from, bytes, stream), "cuMemcpyAsync");
}

void copy_rows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
               size_t rows, Stream stream) {
  if (width == 0 || rows == 0) return;
  // The driver refuses a pitch of 2 GiB, even for one row.
  constexpr size_t kMaxPitch = std::numeric_limits<int32_t>::max();
  if (rows == 1 || to_pitch > kMaxPitch || from_pitch > kMaxPitch) {
    for (size_t row = 0; row < rows; ++row) {
      copy(static_cast<std::byte*>(to) + row * to_pitch,
           static_cast<const std::byte*>(from) + row * from_pitch, width, stream);
    }
    return;
  }
  Copy2D rectangle;
  rectangle.source = from;
  rectangle.source_pitch = from_pitch;
  rectangle.target = to;
  rectangle.target_pitch = to_pitch;
  rectangle.width = width;
  rectangle.height = rows;
  check(driver().copy_2d(&rectangle, stream), "cuMemcpy2DAsync");
}

}  // namespace onnxpar::cuda
