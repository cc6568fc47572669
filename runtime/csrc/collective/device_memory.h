// Memory of the GPU, as collectives use it.
#pragma once

#include "abi/cuda_memory.h"
#include "collective/collective.h"

namespace onnxpar::cuda {

// Copies are enqueued on the stream. All is kept until the end: a CUDA graph holds its addresses.
class DeviceMemory : public Memory {
 public:
  void copy(void* to, const void* from, size_t bytes, onnxpar::Stream) override;
  void zero(void* to, size_t bytes, onnxpar::Stream) override;
  void interleave(void* to, const void* from, size_t outer, size_t parts, size_t chunk,
                  onnxpar::Stream) override;
  std::byte* scratch(size_t slot, size_t bytes, onnxpar::Stream) override;
  void trim() override {}

 private:
  Slab slabs_[2];
};

}  // namespace onnxpar::cuda
