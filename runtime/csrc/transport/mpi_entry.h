// The MPI transport's library, for the library that onnxruntime loads.
//
// There is one library for each ABI of MPI. None of them names an MPI library that it needs: it uses the
// one that the process has loaded, whose symbols must be global (RTLD_GLOBAL). In a wheel, each library
// has a C++ runtime of its own, and an exception that leaves one library cannot be caught by type in
// another. So every call of the transport goes through its library's guard, which turns exceptions into
// texts.
#pragma once

#include <memory>
#include <string>

#include "transport/transport.h"

namespace onnxpar {

// `communicator` is the address of an MPI_Comm; every rank of it must call. The caller owns the
// result. Throws std::runtime_error.
using MpiEntry = Transport* (*)(const void* communicator, const TransportOptions& options);
inline constexpr char kMpiEntryName[] = "onnxpar_mpi_transport";

// Calls action(data). Returns whether it threw nothing; if not, `message` is what it threw.
using MpiGuard = bool (*)(void (*action)(void*), void* data, std::string& message);
inline constexpr char kMpiGuardName[] = "onnxpar_mpi_guard";

// The transport of the library with this file name, which stays loaded. Throws std::runtime_error.
std::unique_ptr<Transport> open_mpi(const char* library, const void* communicator,
                                    const TransportOptions& options);

// All processes of the job.
struct MpiWorld {
  std::string library;  // the transport's file
  const void* communicator = nullptr;
  int rank = 0;
  int size = 0;
  void (*end)() = nullptr;  // finalises MPI, if this initialised it
};
// Initialises MPI unless the program has.
using MpiBegin = void (*)(MpiWorld*);
inline constexpr char kMpiBeginName[] = "onnxpar_mpi_begin";

// For hosts without mpi4py: loads MPI unless the process has, and begins it. Throws std::runtime_error.
MpiWorld begin_mpi();

}  // namespace onnxpar
