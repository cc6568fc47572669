#include "abi/dtype.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

namespace onnxpar {
namespace {

template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

struct Bool {
  uint8_t value;
};

struct Bfloat16 {
  uint16_t bits;
  float load() const { return bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
  static Bfloat16 store(float f) {
    const uint32_t u = bit_cast<uint32_t>(f);
    // Round to nearest even on the 16 bits dropped; a NaN must not be carried into infinity.
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const uint32_t nan = (u >> 16) | 0x40u;
    const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
    return {static_cast<uint16_t>(is_nan ? nan : rounded)};
  }
};

struct Float16 {
  uint16_t bits;
  float load() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13;
    // The exponent bias differs by 112; scaling by 2^112 also makes subnormals normal.
    const float scaled = bit_cast<float>(magnitude) * 0x1p112f;
    const uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    return bit_cast<float>(bit_cast<uint32_t>(scaled) | special | sign);
  }
  static Float16 store(float f) {
    const uint32_t u = bit_cast<uint32_t>(f);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t magnitude = u & 0x7fffffffu;
    // Below 2^-14 the result is subnormal: adding 0.5 lets the float adder round at bit 2^-24.
    const uint32_t subnormal =
        bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    // 65520 and more round to infinity.
    const uint32_t number = magnitude >= 0x477ff000u ? 0x7c00u : finite;
    const uint32_t h = magnitude > 0x7f800000u ? 0x7e00u : number;
    return {static_cast<uint16_t>(h | sign)};
  }
};

template <Reduction R, class T>
T combine(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if constexpr (R == Reduction::kSum) return a + b;
    if constexpr (R == Reduction::kProd) return a * b;
    // Selections instead of branches, so that loops become vector instructions. Equal numbers have
    // equal bits except for the sign of zero: "and" keeps + for the maximum, "or" - for the minimum.
    using U = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    const U x = bit_cast<U>(a);
    const U y = bit_cast<U>(b);
    const T same = bit_cast<T>(static_cast<U>(R == Reduction::kMax ? x & y : x | y));
    const T apart = (R == Reduction::kMax ? a > b : a < b) ? a : b;
    const T number = a == b ? same : apart;
    return (a != a) | (b != b) ? std::numeric_limits<T>::quiet_NaN() : number;
  } else {
    // Unsigned arithmetic wraps; signed overflow would be undefined.
    if constexpr (R == Reduction::kSum) {
      return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    }
    if constexpr (R == Reduction::kProd) {
      return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    }
    if constexpr (R == Reduction::kMax) return std::max(a, b);
    if constexpr (R == Reduction::kMin) return std::min(a, b);
  }
}

template <Reduction R, class T>
struct Kernel {
  using Accumulator = T;
  static T load(T x) { return x; }
  static T store(T x) { return x; }
  static T apply(T a, T b) { return combine<R>(a, b); }
};

template <Reduction R>
struct Kernel<R, Bool> {
  using Accumulator = uint8_t;
  static uint8_t load(Bool x) { return x.value != 0; }
  static Bool store(uint8_t x) { return {x}; }
  static uint8_t apply(uint8_t a, uint8_t b) {
    return R == Reduction::kSum || R == Reduction::kMax ? a | b : a & b;
  }
};

template <Reduction R, class T>
struct FloatKernel {
  using Accumulator = float;
  static float load(T x) { return x.load(); }
  static T store(float x) { return T::store(x); }
  static float apply(float a, float b) { return combine<R>(a, b); }
};
template <Reduction R>
struct Kernel<R, Bfloat16> : FloatKernel<R, Bfloat16> {};
template <Reduction R>
struct Kernel<R, Float16> : FloatKernel<R, Float16> {};

template <class T, Reduction R>
struct Functions {
  using K = Kernel<R, T>;
  static void many(void* dst, const void* const* srcs, size_t sources, size_t count) {
    if (sources == 2) return both(dst, srcs[0], srcs[1], count);
    // The accumulators are on the stack: dst may be one of the sources, and a block in the first-level
    // cache is read and written once per source at the speed of this cache.
    constexpr size_t kBlock = 1024;
    typename K::Accumulator acc[kBlock];
    for (size_t begin = 0; begin < count; begin += kBlock) {
      const size_t n = std::min(kBlock, count - begin);
      const T* first = static_cast<const T*>(srcs[0]) + begin;
      for (size_t i = 0; i < n; ++i) acc[i] = K::load(first[i]);
      for (size_t s = 1; s < sources; ++s) {
        const T* src = static_cast<const T*>(srcs[s]) + begin;
        for (size_t i = 0; i < n; ++i) acc[i] = K::apply(acc[i], K::load(src[i]));
      }
      T* d = static_cast<T*>(dst) + begin;
      for (size_t i = 0; i < n; ++i) d[i] = K::store(acc[i]);
    }
  }
  static void both(void* dst, const void* a, const void* b, size_t count) {
    T* d = static_cast<T*>(dst);
    const T* x = static_cast<const T*>(a);
    const T* y = static_cast<const T*>(b);
    // dst is one of the sources or does not overlap them; an element depends on its own place only.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC ivdep
#endif
    for (size_t i = 0; i < count; ++i) d[i] = K::store(K::apply(K::load(x[i]), K::load(y[i])));
  }
};

// Calls f with a value of Functions<T, R> for the run-time type and reduction.
template <class T, class F>
void dispatch_reduction(Reduction reduction, F&& f) {
  switch (reduction) {
    case Reduction::kSum: return f(Functions<T, Reduction::kSum>{});
    case Reduction::kMax: return f(Functions<T, Reduction::kMax>{});
    case Reduction::kMin: return f(Functions<T, Reduction::kMin>{});
    case Reduction::kProd: return f(Functions<T, Reduction::kProd>{});
  }
}

template <class F>
void dispatch(DType type, Reduction reduction, F&& f) {
  switch (type) {
#define ONNXPAR_CASE(name, text, number, type) \
  case DType::k##name: return dispatch_reduction<type>(reduction, f);
    ONNXPAR_DTYPES(ONNXPAR_CASE)
#undef ONNXPAR_CASE
  }
}

// Calls f with a value of the 16-bit float type.
template <class F>
void half(DType type, F&& f) {
  if (type == DType::kFloat16) return f(Float16{});
  if (type == DType::kBfloat16) return f(Bfloat16{});
  throw std::logic_error("not a float of 16 bits");
}

struct TypeInfo {
  DType type;
  size_t size;
  const char* name;
};

constexpr TypeInfo kTypes[] = {
#define ONNXPAR_ROW(name, text, number, type) {DType::k##name, sizeof(type), text},
    ONNXPAR_DTYPES(ONNXPAR_ROW)
#undef ONNXPAR_ROW
};

const TypeInfo& info(DType type) {
  for (const TypeInfo& t : kTypes) {
    if (t.type == type) return t;
  }
  throw std::invalid_argument("element type " + std::to_string(static_cast<int>(type)) +
                              " of ONNX cannot be communicated (float64/32/16, bfloat16, "
                              "integers of 8 to 64 bits and bool can)");
}

constexpr const char* kReductions[] = {"sum", "max", "min", "prod"};

}  // namespace

DType dtype_from_onnx(int64_t onnx_type) {
  // Numbers that are no int would be those of other types after a cast.
  const auto number = static_cast<int>(onnx_type);
  return info(static_cast<DType>(number == onnx_type ? number : -1)).type;
}
size_t dtype_size(DType type) { return info(type).size; }
const char* dtype_name(DType type) { return info(type).name; }

Reduction reduction_from_name(const std::string& name) {
  for (int i = 0; i < 4; ++i) {
    if (name == kReductions[i]) return static_cast<Reduction>(i);
  }
  throw std::invalid_argument("reduction is '" + name + "', expected sum, max, min or prod");
}

size_t bytes_of(const Shape& shape, DType type) {
  size_t bytes = 0;
  if (__builtin_mul_overflow(product(shape), dtype_size(type), &bytes) ||
      bytes > static_cast<size_t>(INT64_MAX)) {
    throw std::invalid_argument("shape " + to_text(shape) + " of " + dtype_name(type) +
                                " has 2^63 bytes or more");
  }
  return bytes;
}

const char* reduction_name(Reduction reduction) {
  return kReductions[static_cast<int>(reduction)];
}

bool accumulates_wide(DType type, Reduction reduction) {
  return (type == DType::kFloat16 || type == DType::kBfloat16) &&
         (reduction == Reduction::kSum || reduction == Reduction::kProd);
}

void widen(float* to, const void* from, size_t count, DType type) {
  half(type, [&](auto example) {
    using T = decltype(example);
    const T* source = static_cast<const T*>(from);
    for (size_t i = 0; i < count; ++i) to[i] = source[i].load();
  });
}

void narrow(void* to, const float* from, size_t count, DType type) {
  half(type, [&](auto example) {
    using T = decltype(example);
    T* target = static_cast<T*>(to);
    for (size_t i = 0; i < count; ++i) target[i] = T::store(from[i]);
  });
}

void reduce_many(void* dst, const void* const* srcs, size_t sources, size_t count, DType type,
                 Reduction reduction) {
  dispatch(type, reduction, [&](auto f) { decltype(f)::many(dst, srcs, sources, count); });
}

}  // namespace onnxpar
