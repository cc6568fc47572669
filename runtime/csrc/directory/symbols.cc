// Values of symbols from the shapes of the inputs, and the checks of inputs: the rules and the messages
// of `onnxpar_runtime.symbol_checks` in Python.
#include <algorithm>
#include <stdexcept>

#include "directory/manifest.h"

namespace onnxpar {
namespace {

std::string text_of(const std::vector<std::string>& sizes) {
  std::string text;
  for (const std::string& size : sizes) text += (text.empty() ? "" : ", ") + size;
  return "[" + text + "]";
}

template <class T>
void check_elements(const IndexRange& range, const T* data, size_t count, int64_t low,
                    int64_t high) {
  for (size_t i = 0; i < count; ++i) {
    const auto value = static_cast<int64_t>(data[i]);
    if ((value >= low && value <= high) || (range.ignored && value == *range.ignored)) continue;
    throw std::runtime_error("input '" + range.input + "': expected elements from " +
                             std::to_string(low) + " to " + std::to_string(high) + " for node '" +
                             range.node + "', got " + std::to_string(value) + " at element " +
                             std::to_string(i) + " of this rank's shard");
  }
}

}  // namespace

bool SymbolEntry::admits(int64_t value) const {
  const int64_t least = std::max(min, remainder + (min != 0 ? divisor : 0));
  if (value < least || (max > min && value > max)) return false;
  return value % divisor == remainder;
}

std::string SymbolEntry::constraint() const {
  std::string text;
  if (divisor == 1) {
    text = "at least " + std::to_string(std::max(min, remainder + (min != 0 ? divisor : 0)));
  } else {
    text = std::to_string(divisor) + "*N" +
           (remainder != 0 ? " + " + std::to_string(remainder) : "") +
           (min > 0 ? ", N >= 1" : ", N >= 0");
    if (min > divisor + remainder) text += ", at least " + std::to_string(min);
  }
  return text + (max > min ? ", at most " + std::to_string(max) : "");
}

void check_indices(const IndexRange& range, DType type, const void* data, size_t count,
                   const Values& values) {
  int64_t low = 0;
  int64_t high = 0;
  try {
    low = evaluate(range.low, values);
    high = evaluate(range.high, values);
  } catch (const UnknownSymbol&) {
    return;
  }
  if (type == DType::kInt64) {
    check_elements(range, static_cast<const int64_t*>(data), count, low, high);
  } else if (type == DType::kInt32) {
    check_elements(range, static_cast<const int32_t*>(data), count, low, high);
  }
}

Values symbol_values(const Manifest& manifest, const ProgramEntry& program,
                     const std::map<std::string, Shape>& shapes) {
  Values values;
  std::map<std::string, std::string> origin;
  for (const TensorEntry& input : program.inputs) {
    const Shape& shape = shapes.at(input.name);
    if (shape.size() != input.shape.size()) {
      throw std::runtime_error("input '" + input.name + "': expected " +
                               std::to_string(input.shape.size()) + " dims " +
                               text_of(input.shape) + ", got shape " + to_text(shape));
    }
    for (size_t i = 0; i < shape.size(); ++i) {
      const auto name = bare_name(input.shape[i]);
      if (!name || values.count(*name) != 0) continue;
      values[*name] = shape[i];
      origin[*name] = "dim " + std::to_string(i) + " of input '" + input.name + "'";
    }
  }
  for (const TensorEntry& input : program.inputs) {
    const Shape& shape = shapes.at(input.name);
    for (size_t i = 0; i < shape.size(); ++i) {
      try {
        const int64_t expected = evaluate(input.shape[i], values);
        if (expected == shape[i]) continue;
        const auto from = origin.find(input.shape[i]);
        const std::string why =
            from == origin.end() ? "" : " ('" + input.shape[i] + "' in " + from->second + ")";
        throw std::runtime_error("input '" + input.name + "', dim " + std::to_string(i) +
                                 ": expected " + std::to_string(expected) + why + ", got " +
                                 std::to_string(shape[i]));
      } catch (const UnknownSymbol&) {
        continue;
      }
    }
  }
  for (const auto& [name, value] : values) {
    const auto found = manifest.symbols.find(name);
    const SymbolEntry symbol =
        found == manifest.symbols.end() ? SymbolEntry{1, 0, 1, 0, false, ""} : found->second;
    if (!symbol.admits(value)) {
      throw std::runtime_error("symbol '" + name + "' is " + std::to_string(value) +
                               ", which violates its constraint: " + symbol.constraint());
    }
    const auto other = values.find(symbol.same_as);
    if (!symbol.same_as.empty() && other != values.end() && other->second != value) {
      throw std::runtime_error("symbols '" + symbol.same_as + "' and '" + name +
                               "': expected equal values, got " + std::to_string(other->second) +
                               " and " + std::to_string(value));
    }
  }
  for (const EqualSizes& equal : program.equal_sizes) {
    try {
      const int64_t left = evaluate(equal.sizes[0], values);
      const int64_t right = evaluate(equal.sizes[1], values);
      if (left == right) continue;
      throw std::runtime_error(
          "node '" + equal.node + "': dim " + std::to_string(equal.dims[0]) + " of '" +
          equal.values[0] + "' and dim " + std::to_string(equal.dims[1]) + " of '" +
          equal.values[1] + "' must be equal, got " + std::to_string(left) + " and " +
          std::to_string(right));
    } catch (const UnknownSymbol&) {
      continue;
    }
  }
  return values;
}

}  // namespace onnxpar
