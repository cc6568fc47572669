// Memory of the GPU, for collectives.
#pragma once

#include "abi/cuda_memory.h"
#include "collective/collective.h"

namespace onnxpar::cuda {

// Copies are enqueued on the stream. Buffers are kept until the end: CUDA graphs hold their addresses.
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
