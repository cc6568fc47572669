#include "directory/run.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <set>
#include <stdexcept>

namespace onnxpar {
namespace {

constexpr size_t kLine = 64;
constexpr int kWholeTag = 1;
constexpr size_t kMessageBytes = 4096;
constexpr int64_t kAbsent = std::numeric_limits<int64_t>::min();

std::vector<int> everyone(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  for (int i = 0; i < size; ++i) ranks[static_cast<size_t>(i)] = i;
  return ranks;
}

// The largest of every rank's numbers.
void largest(RankContext& rank, std::vector<int64_t>* numbers) {
  Transport& transport = rank.transport();
  Group& group = transport.group(everyone(rank.size()), Lane::kMain);
  const Call call("whether all ranks can go on", hash("agree " + std::to_string(numbers->size())));
  std::vector<int64_t> found(numbers->size());
  transport.all_reduce(group, call, Block(numbers->data(), found.data(), found.size()),
                       DType::kInt64, Reduction::kMax, nullptr);
  *numbers = std::move(found);
}

// Returns on every rank, or throws on every rank: an error of one, or that what runs or symbols differ.
void agree(RankContext& rank, const std::string& error, const std::string& what,
           const Manifest& manifest, const Values& values) {
  std::vector<int64_t> numbers{error.empty() ? 0 : rank.size() - rank.rank()};
  const auto mark = static_cast<int64_t>(hash(what) >> 2);
  numbers.push_back(mark);
  numbers.push_back(-mark);
  std::vector<std::string> names;
  for (const auto& [name, symbol] : manifest.symbols) {
    if (symbol.per_rank) continue;
    names.push_back(name);
    const auto found = values.find(name);
    numbers.push_back(found == values.end() ? kAbsent : found->second);
    numbers.push_back(found == values.end() ? kAbsent : -found->second);
  }
  largest(rank, &numbers);
  if (numbers[0] > 0) {
    const int failed = rank.size() - static_cast<int>(numbers[0]);
    std::vector<int64_t> message(kMessageBytes);
    if (failed == rank.rank()) {
      for (size_t i = 0; i < std::min(error.size(), kMessageBytes); ++i) {
        message[i] = static_cast<unsigned char>(error[i]);
      }
    }
    largest(rank, &message);
    std::string text;
    for (const int64_t c : message) {
      if (c != 0) text += static_cast<char>(c);
    }
    throw std::runtime_error("rank " + std::to_string(failed) + ": " + text);
  }
  if (numbers[1] != -numbers[2]) {
    throw std::runtime_error("expected the same program and numbers on all ranks; rank " +
                             std::to_string(rank.rank()) + " has " + what);
  }
  for (size_t i = 0; i < names.size(); ++i) {
    const int64_t high = numbers[3 + 2 * i];
    const int64_t low = -numbers[4 + 2 * i];
    if (high != kAbsent && high != low) {
      throw std::runtime_error("symbol '" + names[i] + "': expected one value on all ranks, got " +
                               "values from " + std::to_string(low) + " to " +
                               std::to_string(high));
    }
  }
}

// What a number of a run may be: the ranges of `onnxpar train`, in Python
// `onnxpar_runtime.training.hyper`.
struct Range {
  const char* expected;
  std::function<bool(double)> admits;
};

const std::map<std::string, Range>& ranges() {
  // Beyond 2^53 a double does not say which integer it is.
  static const Range count{"an integer from 0 to 2^53", [](double x) {
                             return x >= 0 && x <= 9007199254740992.0 && x == std::floor(x);
                           }};
  static const Range positive{"a number >= 0",
                              [](double x) { return std::isfinite(x) && x >= 0; }};
  static const Range below_one{"a number >= 0 and < 1", [](double x) { return x >= 0 && x < 1; }};
  static const std::map<std::string, Range> all = {
      {"seed", count},
      {"step", count},
      {"micro_batch", count},
      {"loss_weight", positive},
      {"accumulate",
       {"0, 1, 2 or 3", [](double x) { return x == 0 || x == 1 || x == 2 || x == 3; }}},
      {"lr", positive},
      {"momentum", below_one},
      {"dampening", {"a number from 0 to 1", [](double x) { return x >= 0 && x <= 1; }}},
      {"beta1", below_one},
      {"beta2", below_one},
      {"eps", positive},
      {"weight_decay", positive},
      {"clip_norm", {"a number > 0", [](double x) { return x > 0; }}},
  };
  return all;
}

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.10g", value);
  return text;
}

// Makes it an array of the shape `local`, a part of a tensor of the shape `whole`.
HostArray& become(HostArray& array, const char* what, const TensorEntry& entry, const Shape& whole,
                  const Shape& local) {
  try {
    array.become(local, entry.type);
    return array;
  } catch (const std::bad_alloc&) {
    throw std::runtime_error(std::string(what) + " '" + entry.name + "' of shape " +
                             to_text(whole) + ": no memory for the " +
                             std::to_string(bytes_of(local, entry.type)) + " bytes of " + to_text(local));
  }
}

}  // namespace

HostArray::HostArray(Shape shape, DType type) {
  become(shape, type);
  std::memset(data_, 0, bytes_);
}

void HostArray::become(const Shape& shape, DType type) {
  const size_t bytes = bytes_of(shape, type);
  if (bytes + kLine > room_bytes_) {
    *this = {};
    room_.reset(new std::byte[bytes + kLine]);
    room_bytes_ = bytes + kLine;
    const auto address = reinterpret_cast<uintptr_t>(room_.get());
    data_ = room_.get() + (kLine - address % kLine) % kLine;
  }
  shape_ = shape;
  type_ = type;
  bytes_ = bytes;
}

Directory::Directory(const std::string& folder, int rank)
    : manifest_(read_manifest(folder)), rank_(rank) {
  if (rank < 0 || rank >= manifest_.devices) {
    throw std::runtime_error(folder + ": it was made for " + std::to_string(manifest_.devices) +
                             " ranks, and has no rank " + std::to_string(rank));
  }
}

std::string Directory::graph(const std::string& program) const {
  const ProgramEntry& entry = manifest_.program(program);
  const auto index = static_cast<size_t>(rank_);
  if (index >= entry.files.size() || entry.files[index].empty()) {
    throw std::runtime_error(manifest_.folder + ": the graph of '" + program + "' for rank " +
                             std::to_string(rank_) + " was not written");
  }
  return manifest_.folder + "/" + entry.files[index];
}

Shard Directory::shard(const TensorEntry& entry, const Values& values) const {
  return shard_of(entry.dims, values, manifest_.atoms, rank_);
}

HostArray& Directory::state(const std::string& name) {
  const auto found = states_.find(name);
  if (found != states_.end()) return found->second;
  const StateEntry& entry = manifest_.state(name);
  HostArray array(shard(entry, {}).local, entry.type);
  if (entry.kind == "parameter" || entry.kind == "statistic") {
    const auto files = manifest_.shard_files.find(entry.parameter);
    const bool known = files != manifest_.shard_files.end() && files->second.count(rank_) != 0;
    if (!known) {
      throw std::runtime_error(manifest_.folder + ": parameter '" + entry.parameter +
                               "': the shard of rank " + std::to_string(rank_) +
                               " was not written");
    }
    read_tensor(manifest_.folder + "/" + files->second.at(rank_), entry.parameter, entry.type,
                array.shape(), array.data());
  }
  return states_.emplace(name, std::move(array)).first->second;
}

std::string Directory::of_sum(const std::string& name) const {
  const StateEntry& sum = manifest_.state(name);
  if (sum.kind != "micro_gradient") return name;
  for (const auto& [other, entry] : manifest_.states) {
    if (entry.kind == "gradient" && entry.parameter == sum.parameter) return other;
  }
  return name;
}

void collect(RankContext* rank, const std::vector<int>& atoms, const TensorEntry& entry,
             const Values& values, const void* shard, HostArray* whole) {
  std::set<int> used;
  int ranks = 1;
  for (const int atom : atoms) ranks *= atom;
  for (const auto& dim : entry.dims) {
    for (const DimComponent& component : dim) used.insert(component.atoms.begin(), component.atoms.end());
  }
  const int own = rank == nullptr ? 0 : rank->rank();
  const size_t element = dtype_size(entry.type);
  const Call call("the whole of a tensor");
  for (int other = 0; other < ranks; ++other) {
    const std::vector<int> place = coordinates(other, atoms);
    bool owner = true;
    for (size_t a = 0; a < atoms.size(); ++a) {
      owner = owner && (place[a] == 0 || used.count(static_cast<int>(a)) != 0);
    }
    if (!owner || (own != 0 && own != other)) continue;
    const Shard part = shard_of(entry.dims, values, atoms, other);
    const size_t bytes = bytes_of(part.local, entry.type);
    if (own == 0 && other == 0) {
      part.put(shard, whole->data(), element);
    } else if (rank == nullptr) {
      throw std::runtime_error("expected a world of " + std::to_string(ranks) + " ranks, got none");
    } else if (own == other) {
      rank->transport().send(call, 0, kWholeTag, shard, bytes, nullptr);
    } else {
      HostArray received(part.local, entry.type);
      rank->transport().recv(call, other, kWholeTag, received.data(), bytes, Lane::kMain, nullptr);
      part.put(received.data(), whole->data(), element);
    }
  }
}

Run::Run(Directory& directory, const std::string& program)
    : directory_(directory), program_(directory.manifest().program(program)) {}

void Run::give(const std::string& input, DType type, Shape shape, const void* data,
               size_t bytes) {
  for (const TensorEntry& entry : program_.inputs) {
    if (entry.name != input) continue;
    if (entry.type != type) {
      throw std::runtime_error("input '" + input + "': expected " + dtype_name(entry.type) +
                               ", got " + dtype_name(type));
    }
    const size_t needed = bytes_of(shape, type);  // throws if a dim is negative
    if (bytes != needed || (needed > 0 && data == nullptr)) {
      throw std::runtime_error("input '" + input + "': expected " + std::to_string(needed) +
                               " bytes (" + dtype_name(type) + " " + to_text(shape) + "), got " +
                               (bytes != needed ? std::to_string(bytes) : "null"));
    }
    given_[input] = {type, std::move(shape), data};
    ready_ = false;
    return;
  }
  std::string known;
  for (const TensorEntry& entry : program_.inputs) {
    known += (known.empty() ? "'" : ", '") + entry.name + "'";
  }
  throw std::runtime_error("program '" + program_.name + "': no input '" + input +
                           "'; expected " + (known.empty() ? "none" : known));
}

void Run::set(const std::string& number, double value) {
  const auto found = ranges().find(number);
  if (found == ranges().end()) {
    std::string known;
    for (const auto& entry : ranges()) known += (known.empty() ? "" : ", ") + entry.first;
    throw std::runtime_error("no number '" + number + "'; expected one of " + known);
  }
  if (!found->second.admits(value)) {
    throw std::runtime_error("number '" + number + "': expected " + found->second.expected +
                             ", got " + number_text(value));
  }
  numbers_[number] = value;
  ready_ = false;
}

void Run::prepare(RankContext* rank) {
  const Manifest& manifest = directory_.manifest();
  if (rank != nullptr && (rank->size() != manifest.devices || rank->rank() != directory_.rank())) {
    throw std::runtime_error(manifest.folder + ": expected rank " +
                             std::to_string(directory_.rank()) + " of " +
                             std::to_string(manifest.devices) + ", got rank " +
                             std::to_string(rank->rank()) + " of " + std::to_string(rank->size()) +
                             ": start " + std::to_string(manifest.devices) +
                             (manifest.devices == 1 ? " process" : " processes") +
                             ", as with mpirun -n " + std::to_string(manifest.devices));
  }
  std::string error;
  ready_ = false;
  try {
    feeds_.clear();
    results_.clear();
    divide();
    bind_system_inputs();
    bind_states();
    bind_results();
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  if (rank != nullptr && rank->size() > 1) {
    std::string what = "program '" + program_.name + "'";
    for (const auto& [name, value] : numbers_) what += ", " + name + " " + number_text(value);
    agree(*rank, error, what, manifest, values_);
  } else if (!error.empty()) {
    throw std::runtime_error(error);
  }
  ready_ = true;
}

void Run::divide() {
  std::map<std::string, Shape> shapes;
  for (const TensorEntry& entry : program_.inputs) {
    const auto found = given_.find(entry.name);
    if (found == given_.end()) {
      throw std::runtime_error("program '" + program_.name + "': input '" + entry.name +
                               "' was not given");
    }
    shapes[entry.name] = found->second.shape;
  }
  values_ = symbol_values(directory_.manifest(), program_, shapes);
  for (const TensorEntry& entry : program_.inputs) {
    const Shard shard = directory_.shard(entry, values_);
    HostArray& array = become(memory_[entry.name], "input", entry, shard.whole, shard.local);
    if (shard.padded()) std::memset(array.data(), 0, array.bytes());
    shard.take(given_.at(entry.name).data, array.data(), dtype_size(entry.type));
    for (const IndexRange& range : program_.index_ranges) {
      if (range.input == entry.name) {
        check_indices(range, entry.type, array.data(), product(shard.local), values_);
      }
    }
    feeds_.push_back({entry.name, entry.type, shard.local, array.data()});
  }
}

void Run::bind_system_inputs() {
  const std::vector<int> place = coordinates(directory_.rank(), directory_.manifest().atoms);
  for (const SystemInput& entry : program_.system_inputs) {
    const bool weight = entry.kind == "loss_weight";
    const bool real = weight || entry.kind == "hyperparameter";
    const DType type = weight ? DType::kFloat32 : real ? DType::kFloat64 : DType::kInt64;
    HostArray& array = memory_[entry.name];
    array.become(real ? Shape{} : Shape{1}, type);
    if (entry.kind == "symbol") {
      *static_cast<int64_t*>(array.data()) = evaluate(entry.symbol, values_);
    } else if (entry.kind == "coordinate") {
      *static_cast<int64_t*>(array.data()) = place[static_cast<size_t>(entry.atom)];
    } else if (weight) {
      *static_cast<float*>(array.data()) = static_cast<float>(number(entry));
    } else if (real) {
      *static_cast<double*>(array.data()) = number(entry);
    } else {
      *static_cast<int64_t*>(array.data()) = static_cast<int64_t>(number(entry));
    }
    feeds_.push_back({entry.name, type, array.shape(), array.data()});
  }
}

void Run::bind_states() {
  const bool single = setting("accumulate", 0) == 0;
  for (const std::string& name : program_.state_inputs) {
    // A single micro-batch needs no memory for sums.
    HostArray& state = directory_.state(single ? directory_.of_sum(name) : name);
    feeds_.push_back({name, state.type(), state.shape(), state.data()});
  }
}

void Run::bind_results() {
  for (const TensorEntry& entry : program_.outputs) {
    try {
      const Shard shard = directory_.shard(entry, values_);
      HostArray& array = become(made_[entry.name], "output", entry, shard.whole, shard.local);
      results_.push_back({entry.name, entry.type, array.shape(), array.data()});
    } catch (const UnknownSymbol&) {
      results_.push_back({entry.name, entry.type, {}, nullptr});  // its size depends on data
    }
  }
  for (const auto& [name, of] : program_.state_outputs) {
    HostArray& state = directory_.state(of);
    results_.push_back({name, state.type(), state.shape(), state.data()});
  }
}

double Run::setting(const std::string& name, double otherwise) const {
  const auto found = numbers_.find(name);
  return found == numbers_.end() ? otherwise : found->second;
}

double Run::number(const SystemInput& entry) const {
  if (entry.kind == "hyperparameter") return hyperparameter(entry.number);
  return setting(entry.number, entry.kind == "loss_weight" ? 1 : 0);
}

// The scalars of a step, from the settings, with the defaults of `onnxpar train`: see
// `onnxpar_runtime.training.hyper` in Python.
double Run::hyperparameter(const std::string& name) const {
  const std::string& kind = directory_.manifest().optimizer;
  const double step = setting("step", 0) + 1;
  const double decay = setting("weight_decay", kind == "adamw" || kind == "lamb" ? 1e-2 : 0);
  const double beta1 = setting("beta1", 0.9);
  const double beta2 = setting("beta2", 0.999);
  if (numbers_.count("lr") == 0) throw std::runtime_error("the number 'lr' was not set");
  const double rate = numbers_.at("lr");
  const std::map<std::string, double> scalars = {
      {"lr", rate},
      {"clip_norm", setting("clip_norm", std::numeric_limits<double>::infinity())},
      {"weight_decay", decay},
      {"decay", 1 - rate * decay},
      {"momentum", setting("momentum", 0.9)},
      {"dampening", setting("dampening", 0)},
      {"momentum_first", step == 1 ? 1 : 0},
      {"beta1", beta1},
      {"beta1_complement", 1 - beta1},
      {"beta2", beta2},
      {"beta2_complement", 1 - beta2},
      {"eps", setting("eps", kind == "lamb" ? 1e-6 : 1e-8)},
      {"lr_corrected", rate / (1 - std::pow(beta1, step))},
      {"correction2_sqrt", std::sqrt(1 - std::pow(beta2, step))},
      {"loss_scale_inverse", 1},
  };
  const auto found = scalars.find(name);
  if (found != scalars.end()) return found->second;
  throw std::runtime_error("program '" + program_.name + "': unknown hyperparameter '" + name + "'");
}

const Values& Run::prepared() const {
  if (!ready_) throw std::runtime_error("the run has not been prepared since it was changed");
  return values_;
}

std::pair<const std::string, HostArray>* Run::whole(RankContext* rank,
                                                    const std::string& output) {
  const Values& values = prepared();
  for (const TensorEntry& entry : program_.outputs) {
    if (entry.name != output) continue;
    const auto found = made_.find(output);
    if (found == made_.end()) {
      throw std::runtime_error("output '" + output + "': its size depends on data, so it cannot be "
                               "brought together; the value that onnxruntime allocates has this "
                               "rank's part");
    }
    const Shard shard = directory_.shard(entry, values);
    const int own = rank == nullptr ? 0 : rank->rank();
    HostArray* whole = nullptr;
    if (own == 0) whole = &become(wholes_[output], "output", entry, shard.whole, shard.whole);
    collect(rank, directory_.manifest().atoms, entry, values, found->second.data(), whole);
    return own == 0 ? &*wholes_.find(output) : nullptr;
  }
  throw std::runtime_error("program '" + program_.name + "': no output '" + output + "'");
}

}  // namespace onnxpar
