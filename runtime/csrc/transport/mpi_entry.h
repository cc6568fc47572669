// The entry of the MPI transport's library, for the library that onnxruntime loads.
#pragma once

#include "transport/transport.h"

namespace onnxpar {

// `communicator` is the address of an MPI_Comm; every rank of it must call. The caller owns the
// result. Throws std::runtime_error.
using MpiEntry = Transport* (*)(const void* communicator, const TransportOptions& options);
inline constexpr char kMpiEntryName[] = "onnxpar_mpi_transport";

}  // namespace onnxpar
