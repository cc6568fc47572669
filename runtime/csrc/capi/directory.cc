// The part of the interface about directories.
#include "capi/errors.h"
#include "capi/onnxpar.h"
#include "directory/run.h"

using namespace onnxpar;

namespace {

thread_local std::string t_path;
thread_local HostArray t_state;

// Without a world there are no other ranks.
RankContext* rank_of(const World* world, const Directory& directory) {
  const int devices = directory.manifest().devices;
  if (world == nullptr && devices > 1) {
    throw std::runtime_error("expected a world of " + std::to_string(devices) + " ranks, got none");
  }
  if (world == nullptr) return nullptr;
  return &world->rank(directory.rank());
}

void fill(onnxpar_tensor* tensor, const Bound& bound) {
  const size_t bytes = bound.data == nullptr ? 0 : bytes_of(bound.shape, bound.type);
  *tensor = {bound.name.c_str(), static_cast<int>(bound.type), static_cast<int>(bound.shape.size()),
             bound.shape.data(), bound.data, bytes};
}

void fill_at(const std::vector<Bound>& all, int index, onnxpar_tensor* tensor) {
  if (index < 0 || static_cast<size_t>(index) >= all.size()) {
    throw std::runtime_error("expected an index below " + std::to_string(all.size()) + ", got " +
                             std::to_string(index));
  }
  fill(tensor, all[static_cast<size_t>(index)]);
}

void fill(onnxpar_tensor* tensor, const char* name, HostArray& array) {
  *tensor = {name, static_cast<int>(array.type()), static_cast<int>(array.shape().size()),
             array.shape().data(), array.data(), array.bytes()};
}

}  // namespace

Directory* onnxpar_open(const char* folder, int rank) {
  Directory* directory = nullptr;
  guarded([&] { directory = new Directory(folder, rank); });
  return directory;
}

void onnxpar_free_directory(Directory* directory) { delete directory; }

int onnxpar_ranks(const Directory* directory) { return directory->manifest().devices; }

const char* onnxpar_graph(const Directory* directory, const char* program) {
  return guarded([&] { t_path = directory->graph(program); }) == 0 ? t_path.c_str() : nullptr;
}

int onnxpar_whole_state(Directory* directory, const World* world, const char* name,
                        onnxpar_tensor* tensor) {
  return guarded([&] {
    RankContext* rank = rank_of(world, *directory);
    const StateEntry& entry = directory->manifest().state(name);
    if (entry.partial) {
      throw std::runtime_error(std::string("state '") + name + "': its values are partial sums");
    }
    HostArray& local = directory->state(name);
    if (directory->rank() == 0) t_state = HostArray(directory->shard(entry, {}).whole, entry.type);
    collect(rank, directory->manifest().atoms, entry, {}, local.data(), &t_state);
    if (directory->rank() == 0) fill(tensor, entry.name.c_str(), t_state);
  });
}

Run* onnxpar_new_run(Directory* directory, const char* program) {
  Run* run = nullptr;
  guarded([&] { run = new Run(*directory, program); });
  return run;
}

void onnxpar_free_run(Run* run) { delete run; }

int onnxpar_give(Run* run, const char* input, int onnx_type, const int64_t* shape, int dims,
                 const void* data) {
  return guarded([&] {
    run->give(input, dtype_from_onnx(onnx_type), Shape(shape, shape + dims), data);
  });
}

int onnxpar_set(Run* run, const char* number, double value) {
  return guarded([&] { run->set(number, value); });
}

int onnxpar_prepare(Run* run, const World* world) {
  return guarded([&] { run->prepare(rank_of(world, run->directory())); });
}

int onnxpar_feeds(const Run* run) {
  int count = -1;
  guarded([&] { count = static_cast<int>(run->feeds().size()); });
  return count;
}

int onnxpar_feed(const Run* run, int index, onnxpar_tensor* tensor) {
  return guarded([&] { fill_at(run->feeds(), index, tensor); });
}

int onnxpar_results(const Run* run) {
  int count = -1;
  guarded([&] { count = static_cast<int>(run->results().size()); });
  return count;
}

int onnxpar_result(const Run* run, int index, onnxpar_tensor* tensor) {
  return guarded([&] { fill_at(run->results(), index, tensor); });
}

int onnxpar_whole(Run* run, const World* world, const char* output, onnxpar_tensor* tensor) {
  return guarded([&] {
    HostArray* whole = run->whole(rank_of(world, run->directory()), output);
    if (whole != nullptr) fill(tensor, output, *whole);
  });
}
