// The transport of device memory over the transport of host memory, for ranks without NCCL.
//
// Data goes through pinned host memory in pieces: while the ranks exchange one piece, the next is
// copied from the device and the last one to it. The calling thread waits for all of this, so nothing
// runs in the background: a Start is complete when it returns.
#pragma once

#include <memory>

#include "abi/cuda_driver.h"
#include "transport/transport.h"

namespace onnxpar {

// `host` is the rank's transport of host memory, and lives longer. Throws std::runtime_error.
std::unique_ptr<Transport> make_staged_transport(Transport& host, const cuda::Device& device);

}  // namespace onnxpar
