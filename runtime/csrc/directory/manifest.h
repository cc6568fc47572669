// What a host needs of a directory that `onnxpar shard` wrote: its manifest, and the shards of weights.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "abi/dtype.h"
#include "directory/json.h"
#include "directory/sharding.h"

namespace onnxpar {

struct TensorEntry {
  std::string name;
  DType type;
  std::vector<std::string> shape;  // expressions
  std::vector<std::vector<DimComponent>> dims;
};

struct SystemInput {
  std::string name;
  std::string kind;
  std::string symbol;
  int atom = -1;
  std::string number;  // the name under which a host sets its value
};

struct EqualSizes {
  std::string node;
  std::string values[2];
  int64_t dims[2];
  std::string sizes[2];
};

struct IndexRange {
  std::string node;
  std::string input;
  std::string low;
  std::string high;
  std::optional<int64_t> ignored;
};

struct ProgramEntry {
  std::string name;
  std::vector<std::string> files;  // empty where it was not written
  std::vector<TensorEntry> inputs;
  std::vector<TensorEntry> outputs;
  std::vector<SystemInput> system_inputs;
  std::vector<EqualSizes> equal_sizes;
  std::vector<IndexRange> index_ranges;
  std::vector<std::string> state_inputs;
  std::vector<std::pair<std::string, std::string>> state_outputs;  // an output, and its state
};

struct SymbolEntry {
  int64_t min, max, divisor, remainder;
  bool per_rank;
  std::string same_as;

  bool admits(int64_t value) const;
  std::string constraint() const;
};

struct StateEntry : TensorEntry {
  std::string kind;
  std::string parameter;
  bool partial = false;  // its values are partial sums
};

struct Manifest {
  std::string folder;
  std::string dialect;  // the runtime whose collectives the graphs have; empty for ours
  int devices = 0;
  std::vector<int> atoms;
  std::map<std::string, SymbolEntry> symbols;
  std::map<std::string, ProgramEntry> programs;
  std::map<std::string, StateEntry> states;
  std::string optimizer;
  // For each parameter, the file of each rank.
  std::map<std::string, std::map<int, std::string>> shard_files;

  const ProgramEntry& program(const std::string& name) const;
  const StateEntry& state(const std::string& name) const;
};

// Throws std::runtime_error that names the file and the field.
Manifest read_manifest(const std::string& folder);

// Reads a tensor of a safetensors file of the folder into `to`. Throws std::runtime_error if it is not
// there, or has another type or shape.
void read_tensor(const std::string& path, const std::string& name, DType type, const Shape& shape,
                 void* to);

// Whether a rank's values of an input can be read as the node's indices. Throws std::runtime_error.
void check_indices(const IndexRange& range, DType type, const void* data, size_t count,
                   const Values& values);

// The values of the symbols at these global shapes of a program's inputs, by input. Throws
// std::runtime_error if shapes do not fit the inputs or one another, or a constraint does not hold.
Values symbol_values(const Manifest& manifest, const ProgramEntry& program,
                     const std::map<std::string, Shape>& shapes);

}  // namespace onnxpar
