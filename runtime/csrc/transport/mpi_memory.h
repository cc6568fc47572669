// Memory that the members of a communicator share, where all of them run on one node.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>

namespace onnxpar {

// A mapping, undone at its end. The memory itself goes with the last mapping of it, so that nothing
// is left behind however a process ends.
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

// `bytes` zeros, mapped by every member. All members call it. Null on all of them where they are on
// several nodes, where one of them has ONNXPAR_SHARED_MEMORY=0 in its environment, or where one
// cannot map it (containers of their own, a system other than Linux). Throws MpiError.
std::unique_ptr<SharedMemory> share_memory(MPI_Comm comm, size_t bytes);

// How many processes of the communicator are on this node. All members call it. Throws MpiError.
int processes_on_node(MPI_Comm comm);

}  // namespace onnxpar
