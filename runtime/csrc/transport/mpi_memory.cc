#include "transport/mpi_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "transport/mpi_support.h"

namespace onnxpar {
namespace {

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return descriptor_; }

 private:
  const int descriptor_;
};

// The place of the first member's file, and the identity of the file.
struct Place {
  int64_t process = 0;
  int64_t descriptor = -1;  // negative: there is none
  uint64_t device = 0;
  uint64_t inode = 0;
};

// A file without a name. A file in /dev/shm would remain if the job is killed at the wrong moment, and
// in containers this folder is small.
int make_file([[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  const int descriptor = memfd_create("onnxpar", MFD_CLOEXEC);
  if (descriptor >= 0 && ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    ::close(descriptor);
    return -1;
  }
  return descriptor;
#else
  return -1;
#endif
}

int open_file(const Place& place) {
  const std::string path =
      "/proc/" + std::to_string(place.process) + "/fd/" + std::to_string(place.descriptor);
  return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

bool is_at(int descriptor, const Place& place) {
  struct stat status {};
  return descriptor >= 0 && fstat(descriptor, &status) == 0 &&
         static_cast<uint64_t>(status.st_dev) == place.device &&
         static_cast<uint64_t>(status.st_ino) == place.inode;
}

std::unique_ptr<SharedMemory> map_file(int descriptor, size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) return nullptr;
  return std::make_unique<SharedMemory>(data, bytes);
}

bool wanted() {
  const char* text = std::getenv("ONNXPAR_SHARED_MEMORY");
  return text == nullptr || std::strcmp(text, "0") != 0;
}

}  // namespace

SharedMemory::~SharedMemory() { munmap(data_, size_); }

bool all_hold(bool holds, MPI_Comm comm) {
  int least = holds ? 1 : 0;
  check(MPI_Allreduce(MPI_IN_PLACE, &least, 1, MPI_INT, MPI_MIN, comm), "MPI_Allreduce");
  return least != 0;
}

std::vector<int> machines_of(MPI_Comm comm) {
  int own = 0;
  int size = 0;
  check(MPI_Comm_rank(comm, &own), "MPI_Comm_rank");
  check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  MPI_Comm near = MPI_COMM_NULL;
  check(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &near),
        "MPI_Comm_split_type");
  check(MPI_Bcast(&own, 1, MPI_INT, 0, near), "MPI_Bcast");  // the machine's first process
  check(MPI_Comm_free(&near), "MPI_Comm_free");
  std::vector<int> machines(static_cast<size_t>(size));
  check(MPI_Allgather(&own, 1, MPI_INT, machines.data(), 1, MPI_INT, comm), "MPI_Allgather");
  return machines;
}

std::unique_ptr<SharedMemory> share_memory(MPI_Comm comm, size_t bytes) {
  int index = 0;
  check(MPI_Comm_rank(comm, &index), "MPI_Comm_rank");
  if (!all_hold(wanted(), comm)) return nullptr;
  Place place;
  const File made(index == 0 ? make_file(bytes) : -1);
  struct stat status {};
  if (made.get() >= 0 && fstat(made.get(), &status) == 0) {
    place = {getpid(), made.get(), status.st_dev, status.st_ino};
  }
  check(MPI_Bcast(&place, sizeof(place), MPI_BYTE, 0, comm), "MPI_Bcast");
  if (place.descriptor < 0) return nullptr;
  // In another container the process number may name another process, so the opened file is compared.
  const File opened(index == 0 ? -1 : open_file(place));
  const int descriptor = index == 0 ? made.get() : opened.get();
  std::unique_ptr<SharedMemory> memory;
  if (is_at(descriptor, place)) memory = map_file(descriptor, bytes);
  // The first member's file stays open until all have opened it.
  if (!all_hold(memory != nullptr, comm)) return nullptr;
  return memory;
}

}  // namespace onnxpar
