// Memory that the members of a communicator share, if all of them run on one machine.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace onnxpar {

// Where a process has a shared file, and which one it is.
struct FilePlace {
  int64_t process = 0;
  int64_t descriptor = -1;  // negative: there is none
  uint64_t device = 0;
  uint64_t inode = 0;
};

// A mapped file without a name, zero at first. The destructor removes the mapping; the file ends with its
// last mapping and descriptor, so nothing is left however a process ends. A file in /dev/shm would remain
// if the job is killed at the wrong moment, and in containers this folder is small.
class SharedFile {
 public:
  // A new file; null if there is no memory, or on a system other than Linux.
  static std::unique_ptr<SharedFile> make(size_t bytes);
  // The file of another process, which has at least so many bytes; null if this process cannot map it,
  // as in a separate container.
  static std::unique_ptr<SharedFile> open(const FilePlace& place, size_t bytes);
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;
  // Gives memory between the offsets back, in whole pages; they are zero when they are next used.
  // Returns where the rest ends that takes memory.
  size_t release(size_t begin, size_t end);
  // Other processes can no longer open it.
  void close();
  const FilePlace& place() const { return place_; }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t size() const { return size_; }

 private:
  SharedFile(int descriptor, const FilePlace& place) : descriptor_(descriptor), place_(place) {}
  bool map(size_t bytes);

  int descriptor_;
  const FilePlace place_;
  void* data_ = nullptr;
  size_t size_ = 0;
};

// `bytes` zeros that the member `owner` has made, mapped by every member. All members are on one machine,
// and call it. Null on all members if one of them has ONNXPAR_SHARED_MEMORY=0 in its environment, or if
// one cannot map it (because of separate containers, or a system other than Linux). Throws MpiError.
std::unique_ptr<SharedFile> share_memory(MPI_Comm comm, int owner, size_t bytes);

// Where the processes of a communicator are.
struct Processes {
  std::vector<int> machine_of;  // the same number for those of one machine
  bool crowded = false;  // this process's machine has more of them than processors that they may use
};
// All members call it. Throws MpiError.
Processes processes_of(MPI_Comm comm);

// Whether it holds on all members. All members call it. Throws MpiError.
bool all_hold(bool holds, MPI_Comm comm);

}  // namespace onnxpar
