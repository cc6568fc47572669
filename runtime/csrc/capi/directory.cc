// The part of the interface about directories.
#include "capi/errors.h"
#include "capi/onnxpar.h"
#include "capi/ops.h"
#include "directory/run.h"

using namespace onnxpar;

namespace {

constexpr const char* kDirectory = "a directory";
constexpr const char* kRun = "a run";
constexpr const char* kProgram = "the name of a program";
constexpr const char* kTensor = "a tensor to fill";

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
  fill(&given(tensor, kTensor), all[static_cast<size_t>(index)]);
}

void fill(onnxpar_tensor* tensor, const char* name, HostArray& array) {
  *tensor = {name, static_cast<int>(array.type()), static_cast<int>(array.shape().size()),
             array.shape().data(), array.data(), array.bytes()};
}

}  // namespace

Directory* onnxpar_open(const char* folder, int rank) {
  Directory* directory = nullptr;
  guarded([&] { directory = new Directory(text(folder, "a folder"), rank); });
  return directory;
}

void onnxpar_free_directory(Directory* directory) { delete directory; }

int onnxpar_ranks(const Directory* directory) {
  int ranks = -1;
  guarded([&] { ranks = given(directory, kDirectory).manifest().devices; });
  return ranks;
}

const char* onnxpar_graph(const Directory* directory, const char* program) {
  const int failed = guarded([&] {
    const Directory& of = given(directory, kDirectory);
    const std::string path = of.graph(text(program, kProgram));
    const std::string& dialect = of.manifest().dialect;
    if (!dialect.empty() && dialect != t_dialect) {
      throw std::runtime_error(path + ": its collectives are in the dialect '" + dialect +
                               "': call onnxpar_add_dialect(\"" + dialect +
                               "\") on this thread, before RegisterCustomOps");
    }
    t_path = path;
  });
  return failed == 0 ? t_path.c_str() : nullptr;
}

int onnxpar_whole_state(Directory* directory, const World* world, const char* name,
                        onnxpar_tensor* tensor) {
  return guarded([&] {
    Directory& of = given(directory, kDirectory);
    given(tensor, kTensor);
    RankContext* rank = rank_of(world, of);
    const StateEntry& entry = of.manifest().state(text(name, "the name of a state"));
    if (entry.partial) {
      throw std::runtime_error("state '" + entry.name + "': its values are partial sums");
    }
    HostArray& local = of.state(name);
    if (of.rank() == 0) t_state = HostArray(of.shard(entry, {}).whole, entry.type);
    collect(rank, of.manifest().atoms, entry, {}, local.data(), &t_state);
    if (of.rank() == 0) fill(tensor, entry.name.c_str(), t_state);
  });
}

Run* onnxpar_new_run(Directory* directory, const char* program) {
  Run* run = nullptr;
  guarded([&] { run = new Run(given(directory, kDirectory), text(program, kProgram)); });
  return run;
}

void onnxpar_free_run(Run* run) { delete run; }

int onnxpar_give(Run* run, const char* input, int onnx_type, const int64_t* shape, int dims,
                 const void* data, size_t bytes) {
  return guarded([&] {
    Run& to = given(run, kRun);
    const std::string name = text(input, "the name of an input");
    if (dims < 0 || (dims > 0 && shape == nullptr)) {
      throw std::invalid_argument("input '" + name + "': expected a shape, got " +
                                  (dims < 0 ? std::to_string(dims) + " dims" : "null"));
    }
    to.give(name, dtype_from_onnx(onnx_type), Shape(shape, shape + dims), data, bytes);
  });
}

int onnxpar_set(Run* run, const char* number, double value) {
  return guarded([&] { given(run, kRun).set(text(number, "the name of a number"), value); });
}

int onnxpar_prepare(Run* run, const World* world) {
  return guarded([&] {
    Run& prepared = given(run, kRun);
    prepared.prepare(rank_of(world, prepared.directory()));
  });
}

int onnxpar_feeds(const Run* run) {
  int count = -1;
  guarded([&] { count = static_cast<int>(given(run, kRun).feeds().size()); });
  return count;
}

int onnxpar_feed(const Run* run, int index, onnxpar_tensor* tensor) {
  return guarded([&] { fill_at(given(run, kRun).feeds(), index, tensor); });
}

int onnxpar_results(const Run* run) {
  int count = -1;
  guarded([&] { count = static_cast<int>(given(run, kRun).results().size()); });
  return count;
}

int onnxpar_result(const Run* run, int index, onnxpar_tensor* tensor) {
  return guarded([&] { fill_at(given(run, kRun).results(), index, tensor); });
}

int onnxpar_whole(Run* run, const World* world, const char* output, onnxpar_tensor* tensor) {
  return guarded([&] {
    Run& of = given(run, kRun);
    given(tensor, kTensor);
    auto* whole = of.whole(rank_of(world, of.directory()), text(output, "the name of an output"));
    if (whole != nullptr) fill(tensor, whole->first.c_str(), whole->second);
  });
}
