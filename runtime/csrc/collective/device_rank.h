// A rank's data for its GPU, besides its transport for host memory.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "abi/cuda_driver.h"
#include "collective/collective.h"
#include "collective/device_memory.h"
#include "transport/transport.h"

namespace onnxpar {

// A collective that runs on the background stream, until a Wait, or the node that takes its result.
struct Started {
  const cuda::EventHandle* done = nullptr;
  const Collective* collective = nullptr;
  const void* in = nullptr;
  Shape input;
  const void* result = nullptr;
};

struct DeviceRank {
  DeviceRank(int index, std::string library_file) : device(index), library(library_file) {}

  const cuda::Device device;
  const std::string library;  // NCCL's; empty for another transport
  std::unique_ptr<Transport> transport;  // of device memory
  // One for each lane.
  cuda::DeviceMemory memory[kLanes];
  cuda::StreamHandle background;
  // By the address of the result; those that a StartAhead began, by that of the operand.
  std::mutex mutex;
  std::map<const void*, Started> started;
  // What a FinishLater leaves to the last of its program, by its order.
  std::map<int64_t, std::function<void(Stream)>> held;
};

}  // namespace onnxpar
