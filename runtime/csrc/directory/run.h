// One rank of a directory, and what its programs take and make in a run.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collective/world.h"
#include "directory/manifest.h"

namespace onnxpar {

// An array in host memory that begins at a cache line, for fast vector kernels.
class HostArray {
 public:
  HostArray() = default;
  // Of zeros.
  HostArray(Shape shape, DType type);
  // Makes it another array, of undefined values; in the same memory, if that is large enough.
  void become(const Shape& shape, DType type);

  const Shape& shape() const { return shape_; }
  DType type() const { return type_; }
  size_t bytes() const { return bytes_; }
  void* data() { return data_; }

 private:
  Shape shape_;
  DType type_ = DType::kFloat32;
  size_t bytes_ = 0;
  size_t room_bytes_ = 0;
  std::unique_ptr<std::byte[]> room_;
  void* data_ = nullptr;
};

// The directory for one rank: the manifest, and the states, which keep their memory between runs.
class Directory {
 public:
  // Throws std::runtime_error: it is none, or has other ranks.
  Directory(const std::string& folder, int rank);

  const Manifest& manifest() const { return manifest_; }
  int rank() const { return rank_; }
  std::string graph(const std::string& program) const;
  // A state, with its initial value at first.
  HostArray& state(const std::string& name);
  // The state that receives the sum of gradients over micro-batches, for a gradient and the other way
  // round; the name itself if there is none.
  std::string of_sum(const std::string& name) const;
  Shard shard(const TensorEntry& entry, const Values& values) const;

 private:
  const Manifest manifest_;
  const int rank_;
  std::map<std::string, HostArray> states_;
};

// A tensor of a rank's graph.
struct Bound {
  std::string name;
  DType type;
  Shape shape;
  void* data;  // null if onnxruntime has to allocate it
};

// The arguments of one program. The values of inputs may change from run to run.
class Run {
 public:
  Run(Directory& directory, const std::string& program);

  // A whole input of this many bytes; each `prepare` reads `data`, until the input is given again.
  void give(const std::string& input, DType type, Shape shape, const void* data, size_t bytes);
  // A counter, a hyperparameter, or another number of a run. Throws std::runtime_error: it is unknown, or
  // out of its range.
  void set(const std::string& number, double value);
  // Checks all that was given, and divides the inputs. With a rank of several, they all call it, and all
  // go on or none.
  void prepare(RankContext* rank);
  // Throw std::runtime_error before `prepare`.
  const std::vector<Bound>& feeds() const { return prepared(), feeds_; }
  const std::vector<Bound>& results() const { return prepared(), results_; }
  const Directory& directory() const { return directory_; }
  // The whole of an output on rank 0; null on others.
  std::pair<const std::string, HostArray>* whole(RankContext* rank, const std::string& output);

 private:
  struct Given {
    DType type;
    Shape shape;
    const void* data;
  };

  void divide();
  void bind_system_inputs();
  void bind_states();
  void bind_results();
  double number(const SystemInput& entry) const;
  double hyperparameter(const std::string& name) const;
  double setting(const std::string& name, double otherwise) const;
  const Values& prepared() const;

  Directory& directory_;
  const ProgramEntry& program_;
  std::map<std::string, Given> given_;
  std::map<std::string, double> numbers_;
  Values values_;
  bool ready_ = false;
  std::map<std::string, HostArray> memory_;  // of feeds, by name; a result may have the name of a feed
  std::map<std::string, HostArray> made_;    // of results, by name
  std::map<std::string, HostArray> wholes_;
  std::vector<Bound> feeds_;
  std::vector<Bound> results_;
};

// The whole of a tensor on rank 0, from every rank's shard; on other ranks nothing is written. All ranks
// must call it.
void collect(RankContext* rank, const std::vector<int>& atoms, const TensorEntry& entry,
             const Values& values, const void* shard, HostArray* whole);

}  // namespace onnxpar
