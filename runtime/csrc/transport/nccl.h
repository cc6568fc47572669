// The transport of device memory between GPUs, one rank on each.
#pragma once

#include <memory>

#include "abi/cuda_driver.h"
#include "transport/transport.h"

namespace onnxpar {

// `host` is the rank's transport of host memory, which connects the ranks and lives longer. `library`
// is the path of NCCL's library. Throws std::runtime_error.
std::unique_ptr<Transport> make_nccl_transport(Transport& host, const cuda::Device& device,
                                               const char* library,
                                               const TransportOptions& options);

}  // namespace onnxpar
