#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <utility>

#include "transport/mpi_entry.h"

namespace onnxpar {
namespace {

// Functions of the MPI transport's library. Its code may run until the process ends.
struct Library {
  explicit Library(const char* file) : handle(dlopen(file, RTLD_NOW | RTLD_LOCAL)) {
    if (handle == nullptr) throw std::runtime_error(dlerror());
    entry = reinterpret_cast<MpiEntry>(symbol(kMpiEntryName));
    guard = reinterpret_cast<MpiGuard>(symbol(kMpiGuardName));
  }

  void* symbol(const char* name) const {
    void* found = dlsym(handle, name);
    if (found == nullptr) throw std::runtime_error(dlerror());
    return found;
  }

  // Calls f, which calls the library. Throws std::runtime_error, whatever f throws.
  template <class F>
  void guarded(F&& f) const {
    std::string message;
    const auto action = [](void* data) { (*static_cast<F*>(data))(); };
    if (!guard(action, &f, message)) throw std::runtime_error(message);
  }

  void* handle;
  MpiEntry entry;
  MpiGuard guard;
};

class MpiClient : public Transport {
 public:
  MpiClient(const Library& library, std::unique_ptr<Transport> inner)
      : library_(library), inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  bool concurrent() const override { return inner_->concurrent(); }
  bool prompt(int peer) const override { return inner_->prompt(peer); }

  Group& group(const std::vector<int>& ranks, Lane lane) override {
    Group* made = nullptr;
    library_.guarded([&] { made = &inner_->group(ranks, lane); });
    return *made;
  }
  bool overlaps(const Group& group) const override { return inner_->overlaps(group); }

  void all_reduce(Group& group, const Call& call, const Blocks& blocks, DType type,
                  Reduction reduction, Stream stream) override {
    library_.guarded([&] { inner_->all_reduce(group, call, blocks, type, reduction, stream); });
  }
  void all_gather(Group& group, const Call& call, const Blocks& blocks, Stream stream) override {
    library_.guarded([&] { inner_->all_gather(group, call, blocks, stream); });
  }
  void reduce_scatter(Group& group, const Call& call, const Blocks& blocks, DType type,
                      Reduction reduction, Stream stream) override {
    library_.guarded([&] { inner_->reduce_scatter(group, call, blocks, type, reduction, stream); });
  }
  void all_to_all(Group& group, const Call& call, const void* in, void* out, size_t bytes,
                  Stream stream) override {
    library_.guarded([&] { inner_->all_to_all(group, call, in, out, bytes, stream); });
  }
  void broadcast(Group& group, const Call& call, const void* in, void* out, size_t bytes, int root,
                 Stream stream) override {
    library_.guarded([&] { inner_->broadcast(group, call, in, out, bytes, root, stream); });
  }
  void permute(Group& group, const Call& call, const void* in, void* out, size_t bytes,
               const std::vector<Pair>& pairs, Stream stream) override {
    library_.guarded([&] { inner_->permute(group, call, in, out, bytes, pairs, stream); });
  }
  void send(const Call& call, int peer, int tag, const void* in, size_t bytes,
            Stream stream) override {
    library_.guarded([&] { inner_->send(call, peer, tag, in, bytes, stream); });
  }
  void recv(const Call& call, int peer, int tag, void* out, size_t bytes, Lane lane,
            Stream stream) override {
    library_.guarded([&] { inner_->recv(call, peer, tag, out, bytes, lane, stream); });
  }

  void abort(const std::string& message) override {
    library_.guarded([&] { inner_->abort(message); });
  }
  void stop() override {
    library_.guarded([&] { inner_->stop(); });
  }
  void close() override {
    library_.guarded([&] { inner_->close(); });
  }

 private:
  const Library library_;
  const std::unique_ptr<Transport> inner_;
};

// Makes the functions of MPI visible to the transport's library: of the MPI that the process has loaded;
// else of the file that the environment names; else of Open MPI or MPICH, whichever is found.
void load_mpi() {
  if (dlsym(RTLD_DEFAULT, "MPI_Init_thread") != nullptr) return;
  std::vector<std::string> files = {"libmpi.so.40", "libmpi.so.12"};
  // Set by the mpiexec of MPICH's family.
  if (std::getenv("PMI_RANK") != nullptr) std::swap(files[0], files[1]);
  const char* named = std::getenv("ONNXPAR_MPI_LIBRARY");
  if (named != nullptr && *named != '\0') files = {named};
  std::string errors;
  for (const std::string& file : files) {
    const bool opened = dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr;
    if (opened && dlsym(RTLD_DEFAULT, "MPI_Init_thread") != nullptr) return;
    errors += (errors.empty() ? "" : "; ") +
              (opened ? file + " has no function MPI_Init_thread" : std::string(dlerror()));
  }
  throw std::runtime_error("MPI cannot be loaded (ONNXPAR_MPI_LIBRARY names its file): " + errors);
}

}  // namespace

std::unique_ptr<Transport> open_mpi(const char* file, const void* communicator,
                                    const TransportOptions& options) {
  const Library library(file);
  std::unique_ptr<Transport> made;
  library.guarded([&] { made.reset(library.entry(communicator, options)); });
  return std::make_unique<MpiClient>(library, std::move(made));
}

MpiWorld begin_mpi() {
  load_mpi();
  // Only Open MPI has this symbol.
  const bool open = dlsym(RTLD_DEFAULT, "ompi_mpi_comm_world") != nullptr;
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&open_mpi), &info) == 0) {
    throw std::runtime_error("the folder of onnxpar's library is not known");
  }
  const std::string own = info.dli_fname;
  MpiWorld world;
  world.library = own.substr(0, own.rfind('/') + 1) +
                  (open ? "libonnxpar_mpi_openmpi.so" : "libonnxpar_mpi_mpich.so");
  const Library library(world.library.c_str());
  const auto begin = reinterpret_cast<MpiBegin>(library.symbol(kMpiBeginName));
  library.guarded([&] { begin(&world); });
  return world;
}

}  // namespace onnxpar
