#include "directory/manifest.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>
#include <stdexcept>

namespace onnxpar {
namespace {

constexpr int64_t kSchema = 1;
constexpr int64_t kMostDevices = 1 << 16;

std::string contents(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error(path + ": cannot be read");
  return {std::istreambuf_iterator<char>(stream), {}};
}

DType type_of(const Field& field) {
#define ONNXPAR_NAMED(name, written, number, type) \
  if (field.text() == written) return DType::k##name;
  ONNXPAR_DTYPES(ONNXPAR_NAMED)
#undef ONNXPAR_NAMED
  field.fail("an element type, got '" + field.text() + "'");
}

// A file of the folder itself: a foreign manifest must not make a host read other files.
std::string file_name(const Field& field) {
  const std::string& name = field.text();
  if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos) {
    field.fail("a file name without folders");
  }
  return name;
}

template <class Entry>
void read_tensor_entry(const Field& field, size_t atoms, Entry* entry) {
  entry->name = field["name"].text();
  entry->type = type_of(field["dtype"]);
  for (const Field& size : field["shape"].list()) entry->shape.push_back(size.size());
  for (const Field& dim : field["dims"].list()) {
    entry->dims.emplace_back();
    for (const Field& part : dim.list()) {
      DimComponent component{part["size"].size(), part["atoms"].indices()};
      for (const int atom : component.atoms) {
        if (static_cast<size_t>(atom) >= atoms) part.fail("atoms of the mesh");
      }
      entry->dims.back().push_back(std::move(component));
    }
  }
  if (entry->dims.size() != entry->shape.size()) field.fail("as many dims as sizes in the shape");
}

std::vector<TensorEntry> tensors(const Field& field, size_t atoms) {
  std::vector<TensorEntry> found;
  for (const Field& one : field.list()) read_tensor_entry(one, atoms, &found.emplace_back());
  return found;
}

SystemInput system_input(const Field& field, size_t atoms) {
  SystemInput entry;
  entry.name = field["name"].text();
  entry.kind = field["kind"].text();
  entry.number = entry.kind;
  if (entry.kind == "symbol") entry.symbol = field["symbol"].text();
  if (entry.kind == "counter") entry.number = field["counter"].text();
  if (entry.kind == "hyperparameter") entry.number = field["hyperparameter"].text();
  if (entry.kind == "coordinate") {
    entry.atom = static_cast<int>(field["atom"].integer());
    if (entry.atom < 0 || static_cast<size_t>(entry.atom) >= atoms) field.fail("an atom");
  }
  return entry;
}

EqualSizes equal_sizes(const Field& field) {
  EqualSizes entry;
  entry.node = field["node"].text();
  const auto values = field["values"].list();
  const auto dims = field["dims"].list();
  const auto sizes = field["sizes"].list();
  if (values.size() != 2 || dims.size() != 2 || sizes.size() != 2) field.fail("pairs");
  for (size_t i = 0; i < 2; ++i) {
    entry.values[i] = values[i].text();
    entry.dims[i] = dims[i].integer();
    entry.sizes[i] = sizes[i].size();
  }
  return entry;
}

ProgramEntry program_entry(const std::string& name, const Field& field, size_t atoms) {
  ProgramEntry entry;
  entry.name = name;
  for (const Field& file : field["files"].list()) {
    entry.files.push_back(file.is_null() ? "" : file_name(file));
  }
  entry.inputs = tensors(field["inputs"], atoms);
  entry.outputs = tensors(field["outputs"], atoms);
  for (const Field& one : field["system_inputs"].list()) {
    entry.system_inputs.push_back(system_input(one, atoms));
  }
  if (field.has("equal_sizes")) {
    for (const Field& one : field["equal_sizes"].list()) {
      entry.equal_sizes.push_back(equal_sizes(one));
    }
  }
  if (field.has("index_ranges")) {
    for (const Field& one : field["index_ranges"].list()) {
      IndexRange range{one["node"].text(), one["input"].text(), one["low"].size(),
                       one["high"].size(), std::nullopt};
      if (one.has("ignored")) range.ignored = one["ignored"].integer();
      entry.index_ranges.push_back(std::move(range));
    }
  }
  if (field.has("state_inputs")) {
    for (const Field& one : field["state_inputs"].list()) entry.state_inputs.push_back(one.text());
  }
  if (field.has("state_outputs")) {
    for (const Field& one : field["state_outputs"].list()) {
      entry.state_outputs.emplace_back(one["name"].text(), one["state"].text());
    }
  }
  return entry;
}

template <class Map>
const typename Map::mapped_type& named(const Map& all, const std::string& name, const char* what,
                                       const std::string& folder) {
  const auto found = all.find(name);
  if (found != all.end()) return found->second;
  std::string known;
  for (const auto& entry : all) known += (known.empty() ? "'" : ", '") + entry.first + "'";
  throw std::runtime_error(folder + ": no " + what + " '" + name + "'; it has " +
                           (known.empty() ? "none" : known));
}

Json json_of(const std::string& text, const std::string& path) {
  try {
    return parse_json(text);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(path + ": " + error.what());
  }
}

}  // namespace

const ProgramEntry& Manifest::program(const std::string& name) const {
  return named(programs, name, "program", folder);
}

const StateEntry& Manifest::state(const std::string& name) const {
  return named(states, name, "state", folder);
}

Manifest read_manifest(const std::string& folder) {
  const std::string path = folder + "/manifest.json";
  const Json json = json_of(contents(path), path);
  const Field root(json, path);
  Manifest manifest;
  manifest.folder = folder;
  if (root["schema"].integer() != kSchema) root["schema"].fail("1: shard the model again");
  if (root.has("pipeline")) {
    throw std::runtime_error(folder + ": it is divided into pipeline stages, which only the Python "
                             "runtime runs");
  }
  if (root.has("dialect")) manifest.dialect = root["dialect"].text();
  const int64_t devices = root["devices"].integer();
  if (devices < 1 || devices > kMostDevices) root["devices"].fail("a number of ranks");
  manifest.devices = static_cast<int>(devices);
  manifest.atoms = root["mesh"]["atoms"].indices();
  int64_t ranks = 1;
  for (const int atom : manifest.atoms) {
    if (atom < 2 || devices % (ranks * atom) != 0) {
      root["mesh"]["atoms"].fail("factors of the number of devices");
    }
    ranks *= atom;
  }
  if (ranks != devices) root["mesh"]["atoms"].fail("factors of the number of devices");
  const size_t atoms = manifest.atoms.size();
  for (const auto& [name, field] : root["symbols"].entries()) {
    SymbolEntry symbol{field["min"].integer(),       field["max"].integer(),
                       field["divisor"].integer(),   field["remainder"].integer(),
                       field["per_rank"].truth(),    ""};
    if (symbol.divisor < 1) field["divisor"].fail("at least 1");
    if (field.has("same_as")) symbol.same_as = field["same_as"].text();
    manifest.symbols.emplace(name, symbol);
  }
  for (const auto& [name, field] : root["programs"].entries()) {
    manifest.programs.emplace(name, program_entry(name, field, atoms));
  }
  for (const auto& [name, field] : root["parameters"].entries()) {
    for (const Field& shard : field["shards"].list()) {
      for (const int rank : shard["ranks"].indices()) {
        manifest.shard_files[name][rank] = file_name(shard["file"]);
      }
    }
  }
  if (root.has("training")) {
    const Field training = root["training"];
    manifest.optimizer = training["optimizer"]["kind"].text();
    for (const Field& field : training["states"].list()) {
      StateEntry state;
      read_tensor_entry(field, atoms, &state);
      state.kind = field["kind"].text();
      state.parameter = field["parameter"].text();
      state.partial = !field["partial"].list().empty();
      manifest.states.emplace(state.name, state);
    }
  }
  return manifest;
}

void read_tensor(const std::string& path, const std::string& name, DType type, const Shape& shape,
                 void* to) {
  static const std::map<std::string, DType> kTypes = {
      {"F64", DType::kFloat64},  {"F32", DType::kFloat32},   {"F16", DType::kFloat16},
      {"BF16", DType::kBfloat16}, {"I64", DType::kInt64},    {"I32", DType::kInt32},
      {"I16", DType::kInt16},    {"I8", DType::kInt8},       {"U64", DType::kUint64},
      {"U32", DType::kUint32},   {"U16", DType::kUint16},    {"U8", DType::kUint8},
      {"BOOL", DType::kBool},
  };
  std::ifstream stream(path, std::ios::binary);
  unsigned char length_bytes[8] = {};
  stream.read(reinterpret_cast<char*>(length_bytes), 8);
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = (length << 8) | length_bytes[i];
  if (!stream || length > 100'000'000) throw std::runtime_error(path + ": no safetensors file");
  std::string header(length, '\0');
  stream.read(header.data(), static_cast<std::streamsize>(length));
  if (!stream) throw std::runtime_error(path + ": it is truncated");
  const Json json = json_of(header, path);
  const Json* found = json.find(name);
  if (found == nullptr) throw std::runtime_error(path + ": it has no tensor '" + name + "'");
  const Field field(*found, path + ": " + name);
  Shape stored;
  for (const Field& size : field["shape"].list()) stored.push_back(size.integer());
  const auto known = kTypes.find(field["dtype"].text());
  if (stored != shape || known == kTypes.end() || known->second != type) {
    field.fail(std::string(dtype_name(type)) + " " + to_text(shape) + ", got " +
               field["dtype"].text() + " " + to_text(stored));
  }
  const auto offsets = field["data_offsets"].list();
  const size_t bytes = bytes_of(shape, type);
  if (offsets.size() != 2 || offsets[0].integer() < 0 ||
      offsets[1].integer() - offsets[0].integer() != static_cast<int64_t>(bytes)) {
    field["data_offsets"].fail(std::to_string(bytes) + " bytes");
  }
  stream.seekg(static_cast<std::streamoff>(8 + length) + offsets[0].integer());
  stream.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes));
  if (!stream) throw std::runtime_error(path + ": it is truncated");
}

}  // namespace onnxpar
