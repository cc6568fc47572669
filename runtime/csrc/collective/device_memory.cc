#include "collective/device_memory.h"

namespace onnxpar::cuda {

void DeviceMemory::copy(void* to, const void* from, size_t bytes, onnxpar::Stream stream) {
  cuda::copy(to, from, bytes, stream);
}

void DeviceMemory::zero(void* to, size_t bytes, onnxpar::Stream stream) {
  if (bytes != 0) check(driver().set_8(to, 0, bytes, stream), "cuMemsetD8Async");
}

void DeviceMemory::interleave(void* to, const void* from, size_t outer, size_t parts, size_t chunk,
                              onnxpar::Stream stream) {
  std::byte* target = static_cast<std::byte*>(to);
  const std::byte* source = static_cast<const std::byte*>(from);
  // Use the smaller number of copies; one of the two numbers is the size of a group.
  if (parts <= outer) {
    for (size_t p = 0; p < parts; ++p) {
      copy_rows(target + p * outer * chunk, chunk, source + p * chunk, parts * chunk, chunk, outer,
                stream);
    }
  } else {
    for (size_t o = 0; o < outer; ++o) {
      copy_rows(target + o * chunk, outer * chunk, source + o * parts * chunk, chunk, chunk, parts,
                stream);
    }
  }
}

std::byte* DeviceMemory::scratch(size_t slot, size_t bytes, onnxpar::Stream stream) {
  return slabs_[slot].get(bytes, stream);
}

}  // namespace onnxpar::cuda
