#include <dlfcn.h>

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

}  // namespace

std::unique_ptr<Transport> open_mpi(const char* file, const void* communicator,
                                    const TransportOptions& options) {
  const Library library(file);
  std::unique_ptr<Transport> made;
  library.guarded([&] { made.reset(library.entry(communicator, options)); });
  return std::make_unique<MpiClient>(library, std::move(made));
}

}  // namespace onnxpar
