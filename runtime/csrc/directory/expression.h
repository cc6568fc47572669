// The size expressions of a manifest: integers, names of symbols, and integer arithmetic. The same
// grammar as in Python's `onnxpar_format.expressions`, which writes down its rules.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>

namespace onnxpar {

using Values = std::map<std::string, int64_t>;

// A symbol in an expression has no value.
struct UnknownSymbol : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The value. Throws UnknownSymbol; or std::runtime_error if it is no integer, or beyond 64 bits.
int64_t evaluate(const std::string& text, const Values& values);
// The symbol, if the expression is a symbol alone.
std::optional<std::string> bare_name(const std::string& text);

}  // namespace onnxpar
