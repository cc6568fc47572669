// Memory that the members of a communicator share, if all of them run on one machine.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace onnxpar {

// A mapping, which the destructor removes. The memory is freed with its last mapping, so nothing is
// left however a process ends.
class SharedMemory {
 public:
  SharedMemory(void* data, size_t size) : data_(data), size_(size) {}
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* const data_;
  const size_t size_;
};

// `bytes` zeros, mapped by every member. All members are on one machine, and call it. Null on all
// members if one of them has ONNXPAR_SHARED_MEMORY=0 in its environment, or if one cannot map it
// (because of separate containers, or a system other than Linux). Throws MpiError.
std::unique_ptr<SharedMemory> share_memory(MPI_Comm comm, size_t bytes);

// The machine of each process: the same number for those of one machine. All members call it. Throws
// MpiError.
std::vector<int> machines_of(MPI_Comm comm);

// Whether it holds on all members. All members call it. Throws MpiError.
bool all_hold(bool holds, MPI_Comm comm);

}  // namespace onnxpar
