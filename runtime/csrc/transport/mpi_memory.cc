#include "transport/mpi_memory.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "transport/mpi_support.h"

namespace onnxpar {
namespace {

int make_file([[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  // Beyond the limit of a file's size, the system ends the process.
  struct rlimit limit {};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur < bytes) return -1;
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

bool wanted() {
  const char* text = std::getenv("ONNXPAR_SHARED_MEMORY");
  return text == nullptr || std::strcmp(text, "0") != 0;
}

// The processors that at least one member may use.
int processors(MPI_Comm comm) {
#if defined(__linux__)
  constexpr size_t kMost = 8192;  // of a machine
  std::vector<unsigned char> allowed(kMost / 8);
  if (sched_getaffinity(0, allowed.size(), reinterpret_cast<cpu_set_t*>(allowed.data())) == 0) {
    check(MPI_Allreduce(MPI_IN_PLACE, allowed.data(), static_cast<int>(allowed.size()),
                        MPI_UNSIGNED_CHAR, MPI_BOR, comm),
          "MPI_Allreduce");
    return CPU_COUNT_S(allowed.size(), reinterpret_cast<cpu_set_t*>(allowed.data()));
  }
#endif
  return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
}

}  // namespace

std::unique_ptr<SharedFile> SharedFile::make(size_t bytes) {
  const int descriptor = make_file(bytes);
  struct stat status {};
  if (descriptor < 0) return nullptr;
  if (fstat(descriptor, &status) != 0) {
    ::close(descriptor);
    return nullptr;
  }
  const FilePlace place{getpid(), descriptor, status.st_dev, status.st_ino};
  std::unique_ptr<SharedFile> file(new SharedFile(descriptor, place));
  return file->map(bytes) ? std::move(file) : nullptr;
}

std::unique_ptr<SharedFile> SharedFile::open(const FilePlace& place, size_t bytes) {
  const std::string path =
      "/proc/" + std::to_string(place.process) + "/fd/" + std::to_string(place.descriptor);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return nullptr;
  std::unique_ptr<SharedFile> file(new SharedFile(descriptor, place));
  // In another container the process number may name another process.
  struct stat status {};
  const bool same = fstat(descriptor, &status) == 0 &&
                    static_cast<uint64_t>(status.st_dev) == place.device &&
                    static_cast<uint64_t>(status.st_ino) == place.inode;
  return same && file->map(bytes) ? std::move(file) : nullptr;
}

SharedFile::~SharedFile() {
  if (data_ != nullptr) munmap(data_, size_);
  close();
}

bool SharedFile::map(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (data == MAP_FAILED) return false;
  data_ = data;
  size_ = bytes;
  return true;
}

size_t SharedFile::release([[maybe_unused]] size_t begin, size_t end) {
#if defined(__linux__)
  static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t first = (begin + page - 1) / page * page;
  const size_t last = std::min((end + page - 1) / page * page, size_);
  if (first < last && madvise(data() + first, last - first, MADV_REMOVE) == 0) return first;
#endif
  return end;
}

void SharedFile::close() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

bool all_hold(bool holds, MPI_Comm comm) {
  int least = holds ? 1 : 0;
  check(MPI_Allreduce(MPI_IN_PLACE, &least, 1, MPI_INT, MPI_MIN, comm), "MPI_Allreduce");
  return least != 0;
}

Processes processes_of(MPI_Comm comm) {
  int own = 0;
  int size = 0;
  check(MPI_Comm_rank(comm, &own), "MPI_Comm_rank");
  check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  MPI_Comm near = MPI_COMM_NULL;
  check(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &near),
        "MPI_Comm_split_type");
  check(MPI_Bcast(&own, 1, MPI_INT, 0, near), "MPI_Bcast");  // the machine's first process
  Processes found;
  int here = 0;
  check(MPI_Comm_size(near, &here), "MPI_Comm_size");
  found.crowded = here > processors(near);
  check(MPI_Comm_free(&near), "MPI_Comm_free");
  found.machine_of.resize(static_cast<size_t>(size));
  check(MPI_Allgather(&own, 1, MPI_INT, found.machine_of.data(), 1, MPI_INT, comm), "MPI_Allgather");
  return found;
}

std::unique_ptr<SharedFile> share_memory(MPI_Comm comm, int owner, size_t bytes) {
  int index = 0;
  check(MPI_Comm_rank(comm, &index), "MPI_Comm_rank");
  if (!all_hold(wanted(), comm)) return nullptr;
  std::unique_ptr<SharedFile> file = index == owner ? SharedFile::make(bytes) : nullptr;
  FilePlace place = file ? file->place() : FilePlace();
  check(MPI_Bcast(&place, sizeof(place), MPI_BYTE, owner, comm), "MPI_Bcast");
  if (place.descriptor < 0) return nullptr;
  if (index != owner) file = SharedFile::open(place, bytes);
  // The owner's file stays open until all have opened it.
  if (!all_hold(file != nullptr, comm)) return nullptr;
  file->close();
  return file;
}

}  // namespace onnxpar
