// What is computed, of which types and in which order the arguments come says the kernel's name, a template's
// instance as in "void onnxruntime::cuda::_UnaryElementWise<float, float, onnxruntime::cuda::OP_Sqrt<float>,
// 256, 4>(…)". All is computed in float64, which is enough for integers below 2^53, and rounded once.
#include "provider_kernels.h"

#include <cxxabi.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device.h"

namespace standin {
namespace {

using Number = double;
struct Type {
  size_t size;
  std::function<Number(const char*)> get;
  std::function<void(char*, Number)> set;
};

template <class T>
Type type_of() {
  return {sizeof(T),
          [](const char* at) {
            T value;
            memcpy(&value, at, sizeof(T));
            return static_cast<Number>(value);
          },
          [](char* at, Number number) {
            T const value = static_cast<T>(number);
            memcpy(at, &value, sizeof(T));
          }};
}

const Type* find_type(const std::string& name) {
  static const std::map<std::string, Type> types = {
      {"float", type_of<float>()}, {"double", type_of<double>()},  {"int", type_of<int32_t>()},
      {"long", type_of<int64_t>()}, {"bool", type_of<bool>()},
  };
  const auto found = types.find(name);
  return found == types.end() ? nullptr : &found->second;
}

using Unary = Number (*)(Number);
using Binary = Number (*)(Number, Number);

Unary find_unary(const std::string& name) {
  static const std::map<std::string, Unary> all = {
      {"OP_Abs", [](Number x) { return std::fabs(x); }},
      {"OP_Cast", [](Number x) { return x; }},
      {"OP_Exp", [](Number x) { return std::exp(x); }},
      {"OP_Log", [](Number x) { return std::log(x); }},
      {"OP_Neg", [](Number x) { return -x; }},
      {"OP_Not", [](Number x) { return x == 0 ? 1.0 : 0.0; }},
      {"OP_Reciprocal", [](Number x) { return 1 / x; }},
      {"OP_Relu", [](Number x) { return x > 0 ? x : 0; }},
      {"OP_Sigmoid", [](Number x) { return 1 / (1 + std::exp(-x)); }},
      {"OP_Sqrt", [](Number x) { return std::sqrt(x); }},
      {"OP_Tanh", [](Number x) { return std::tanh(x); }},
      {"_IsInf", [](Number x) { return std::isinf(x) ? 1.0 : 0.0; }},
      {"_IsNan", [](Number x) { return std::isnan(x) ? 1.0 : 0.0; }},
  };
  const auto found = all.find(name);
  return found == all.end() ? nullptr : found->second;
}

Binary find_binary(const std::string& name) {
  static const std::map<std::string, Binary> all = {
      {"OP_Add", [](Number x, Number y) { return x + y; }},
      {"OP_And", [](Number x, Number y) { return x != 0 && y != 0 ? 1.0 : 0.0; }},
      {"OP_Div", [](Number x, Number y) { return x / y; }},
      {"OP_Equal", [](Number x, Number y) { return x == y ? 1.0 : 0.0; }},
      {"OP_Greater", [](Number x, Number y) { return x > y ? 1.0 : 0.0; }},
      {"OP_Less", [](Number x, Number y) { return x < y ? 1.0 : 0.0; }},
      {"OP_Max", [](Number x, Number y) { return x > y ? x : y; }},
      {"OP_Min", [](Number x, Number y) { return x < y ? x : y; }},
      {"OP_Mul", [](Number x, Number y) { return x * y; }},
      {"OP_Or", [](Number x, Number y) { return x != 0 || y != 0 ? 1.0 : 0.0; }},
      {"OP_Sub", [](Number x, Number y) { return x - y; }},
  };
  const auto found = all.find(name);
  return found == all.end() ? nullptr : found->second;
}

// A template's instance: its name and arguments, without namespaces.
struct Instance {
  std::string name;
  std::vector<std::string> arguments;
};

std::string without_namespaces(const std::string& text) {
  const size_t end = std::min(text.find('<'), text.size()), at = text.rfind("::", end);
  return at == std::string::npos ? text : text.substr(at + 2);
}

Instance parse(const std::string& text) {
  const std::string plain = without_namespaces(text);
  Instance made{plain.substr(0, plain.find('<')), {}};
  int depth = 0;
  for (size_t i = made.name.size(); i < plain.size(); ++i) {
    const char c = plain[i];
    if (c == '>' && --depth == 0) break;
    if (depth == 1 && c == ',') {
      made.arguments.emplace_back();
    } else if (depth >= 1 && !(c == ' ' && made.arguments.back().empty())) {
      made.arguments.back() += c;
    }
    if (c == '<' && ++depth == 1) made.arguments.emplace_back();
  }
  return made;
}

// The kernel's arguments.
template <class T>
T value(void** arguments, size_t which, size_t offset = 0) {
  T read;
  memcpy(&read, static_cast<char*>(arguments[which]) + offset, sizeof(T));
  return read;
}
size_t count_of(const std::string& type, void** arguments, size_t which) {
  if (type == "int") return static_cast<size_t>(value<int32_t>(arguments, which));
  return value<size_t>(arguments, which);
}

// Where the operands of an element are.
using Places = std::function<std::pair<size_t, size_t>(size_t)>;

Work unary(const Instance& kernel, void** arguments) {
  const Type* const from = find_type(kernel.arguments[0]);
  const Type* const to = find_type(kernel.arguments[1]);
  const Unary f = find_unary(parse(kernel.arguments[2]).name);
  if (from == nullptr || to == nullptr || f == nullptr) return nullptr;
  const char* const in = value<const char*>(arguments, 0);
  char* const out = value<char*>(arguments, 1);
  const size_t count = count_of("long", arguments, 3);
  return [=] {
    for (size_t i = 0; i < count; ++i) to->set(out + i * to->size, f(from->get(in + i * from->size)));
  };
}

Work binary(const std::string* types, const std::string& f_name, const char* left,
            const char* right, char* out, size_t count, const Places& places) {
  const Type* const to = find_type(types[0]);
  const Type* const a = find_type(types[1]);
  const Type* const b = find_type(types[2]);
  const Binary f = find_binary(parse(f_name).name);
  if (to == nullptr || a == nullptr || b == nullptr || f == nullptr) return nullptr;
  return [=] {
    for (size_t i = 0; i < count; ++i) {
      const auto [x, y] = places(i);
      to->set(out + i * to->size, f(a->get(left + x * a->size), b->get(right + y * b->size)));
    }
  };
}

// template <bool, bool, T, T1, T2, F, …, N>(const T1*, const T2*, T*, F, N): those that are not
// stepped through are of one element.
Work simple(const Instance& kernel, void** arguments) {
  const auto& of = kernel.arguments;
  const bool steps_left = of[0] == "true", steps_right = of[1] == "true";
  return binary(&of[2], of[5], value<const char*>(arguments, 0), value<const char*>(arguments, 1),
                value<char*>(arguments, 2), count_of(of[8], arguments, 4), [=](size_t i) {
                  return std::pair(steps_left ? i : 0, steps_right ? i : 0);
                });
}

// template <T, T1, T2, F, …, N>(const T1*, const T2*, DivMod size, [DivMod channels,] T*, F, N)
Work by_channel(const Instance& kernel, void** arguments, bool batches) {
  const auto& of = kernel.arguments;
  const size_t size = static_cast<size_t>(value<int32_t>(arguments, 2));
  const size_t channels = batches ? static_cast<size_t>(value<int32_t>(arguments, 3)) : 0;
  const size_t out = batches ? 4 : 3;
  return binary(&of[0], of[3], value<const char*>(arguments, 0), value<const char*>(arguments, 1),
                value<char*>(arguments, out), count_of(of[6], arguments, out + 2), [=](size_t i) {
                  return std::pair(i, batches ? i / size % channels : i / size);
                });
}

// template <T, T1, T2, F, bool, bool, …, N>(int rank, TArray<int64_t> strides, const T1*, TArray<int64_t>
// strides, const T2*, TArray<DivMod> strides of the result, T*, F, N), in elements; a TArray is a size
// and the values, and a DivMod begins with its divisor.
Work broadcast(const Instance& kernel, void** arguments) {
  const auto& of = kernel.arguments;
  const bool uses_left = of[4] == "true", uses_right = of[5] == "true";
  std::vector<size_t> left, right, own;
  for (int d = 0; d < value<int32_t>(arguments, 0); ++d) {
    const size_t at = static_cast<size_t>(d);
    left.push_back(uses_left ? value<size_t>(arguments, 1, 8 + 8 * at) : 0);
    right.push_back(uses_right ? value<size_t>(arguments, 3, 8 + 8 * at) : 0);
    own.push_back(static_cast<size_t>(value<int32_t>(arguments, 5, 4 + 12 * at)));
  }
  return binary(&of[0], of[3], value<const char*>(arguments, 2), value<const char*>(arguments, 4),
                value<char*>(arguments, 6), count_of(of[8], arguments, 8), [=](size_t i) {
                  size_t x = uses_left ? 0 : i, y = uses_right ? 0 : i;
                  for (size_t d = 0; d < own.size(); ++d) {
                    x += i / own[d] * left[d];
                    y += i / own[d] * right[d];
                    i %= own[d];
                  }
                  return std::pair(x, y);
                });
}

// template <T, kind of X, kind of Y, …>(const bool*, const T*, const T*, T*, N), kinds: 0 is stepped through,
// 1 is of one element.
Work select(const Instance& kernel, void** arguments) {
  const Type* const type = find_type(kernel.arguments[0]);
  if (type == nullptr) return nullptr;
  const auto one = [&](size_t which) {
    return kernel.arguments[which].find(")1") != std::string::npos;
  };
  const bool condition_is_one = one(1), left_is_one = one(2), right_is_one = one(3);
  const bool* const condition = value<const bool*>(arguments, 0);
  const char* const left = value<const char*>(arguments, 1);
  const char* const right = value<const char*>(arguments, 2);
  char* const out = value<char*>(arguments, 3);
  const size_t count = count_of("int", arguments, 4), size = type->size;
  return [=] {
    for (size_t i = 0; i < count; ++i) {
      const bool chosen = condition[condition_is_one ? 0 : i];
      const char* from = chosen ? left + (left_is_one ? 0 : i * size)
                                : right + (right_is_one ? 0 : i * size);
      memcpy(out + i * size, from, size);
    }
  };
}

// template <In, Out, …, bool logarithm>(Out*, const In*, int rows, int stride, int size)
Work softmax(const Instance& kernel, void** arguments) {
  const Type* const from = find_type(kernel.arguments[0]);
  const Type* const to = find_type(kernel.arguments[1]);
  if (from == nullptr || to == nullptr) return nullptr;
  const bool logarithm = kernel.arguments[4] == "true";
  char* const out = value<char*>(arguments, 0);
  const char* const in = value<const char*>(arguments, 1);
  const size_t rows = count_of("int", arguments, 2), stride = count_of("int", arguments, 3),
               size = count_of("int", arguments, 4);
  return [=] {
    for (size_t row = 0; row < rows; ++row) {
      std::vector<Number> numbers;
      for (size_t i = 0; i < size; ++i) {
        numbers.push_back(from->get(in + (row * stride + i) * from->size));
      }
      const Number most = *std::max_element(numbers.begin(), numbers.end());
      Number sum = 0;
      for (Number x : numbers) sum += std::exp(x - most);
      for (size_t i = 0; i < size; ++i) {
        const Number log = numbers[i] - most - std::log(sum);
        to->set(out + (row * stride + i) * to->size, logarithm ? log : std::exp(log));
      }
    }
  };
}

}  // namespace

Work provider_kernel(const char* name, void** arguments) {
  int status = 0;
  const std::unique_ptr<char, decltype(&free)> text(
      abi::__cxa_demangle(name, nullptr, nullptr, &status), &free);
  if (status != 0) return nullptr;
  std::string demangled = text.get();
  if (demangled.rfind("void ", 0) == 0) demangled.erase(0, 5);
  const Instance kernel = parse(demangled);
  Work work;
  if (kernel.name == "_UnaryElementWise") work = unary(kernel, arguments);
  if (kernel.name == "_BinaryElementWiseSimple") work = simple(kernel, arguments);
  if (kernel.name == "_BinaryElementWise") work = broadcast(kernel, arguments);
  if (kernel.name == "_BinaryElementWiseRhsPerChannelBatch1") {
    work = by_channel(kernel, arguments, false);
  }
  if (kernel.name == "_BinaryElementWiseRhsPerChannelBatchN") {
    work = by_channel(kernel, arguments, true);
  }
  if (kernel.name == "_TenaryElementWiseSimple") work = select(kernel, arguments);
  if (kernel.name == "softmax_warp_forward") work = softmax(kernel, arguments);
  if (!work) return nullptr;
  return [work] {
    StandinAccess access;
    work();
  };
}

}  // namespace standin
