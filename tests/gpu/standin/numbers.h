// Numbers on the device: NCCL's types and reductions, and 16-bit floats, rounded at every step.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

inline size_t size_of(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return type >= 0 && type < 10 ? sizes[type] : 0;
}

inline float from_half(uint16_t h) {
  uint32_t const sign = static_cast<uint32_t>(h & 0x8000) << 16;
  int const exponent = (h >> 10) & 31;
  uint32_t const mantissa = h & 1023;
  float value = 0;
  if (exponent == 31) {
    uint32_t const bits = sign | 0x7f800000 | mantissa << 13;
    memcpy(&value, &bits, 4);
    return value;
  }
  value = exponent == 0 ? static_cast<float>(mantissa) / 16777216.0f
                        : static_cast<float>(mantissa | 1024) / 1024.0f *
                              static_cast<float>(exponent >= 15 ? 1 << (exponent - 15) : 1) /
                              static_cast<float>(exponent < 15 ? 1 << (15 - exponent) : 1);
  return sign ? -value : value;
}
inline uint16_t to_half(float value) {
  uint16_t const sign = std::signbit(value) ? 0x8000 : 0;
  float const size = std::fabs(value);
  if (std::isnan(value)) return 0x7e00;
  if (size >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
  if (size < 1.0f / 16384) {
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(size * 16777216.0f)));
  }
  int exponent = 0;
  float const mantissa = std::frexp(size, &exponent);
  // 2048 carries into the exponent by itself.
  int const bits = static_cast<int>(std::nearbyint(mantissa * 2048)) - 1024;
  return static_cast<uint16_t>(sign | (((exponent + 14) << 10) + bits));
}
inline float from_brain(uint16_t b) {
  uint32_t const bits = static_cast<uint32_t>(b) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline uint16_t to_brain(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class T>
T combine(T a, T b, int operation) {
  switch (operation) {
    case 0: return static_cast<T>(a + b);
    case 1: return static_cast<T>(a * b);
    case 2: return a > b ? a : b;
    default: return a < b ? a : b;
  }
}

template <class T>
void reduce(unsigned char* into, const unsigned char* from, size_t bytes, int operation) {
  for (size_t i = 0; i < bytes / sizeof(T); ++i) {
    T a, b;
    memcpy(&a, into + i * sizeof(T), sizeof(T));
    memcpy(&b, from + i * sizeof(T), sizeof(T));
    a = combine(a, b, operation);
    memcpy(into + i * sizeof(T), &a, sizeof(T));
  }
}
inline void reduce(unsigned char* into, const unsigned char* from, size_t bytes, int type, int operation) {
  switch (type) {
    case 0: return reduce<int8_t>(into, from, bytes, operation);
    case 1: return reduce<uint8_t>(into, from, bytes, operation);
    // Sums and products that wrap are defined for unsigned numbers alone.
    case 2:
      return operation < 2 ? reduce<uint32_t>(into, from, bytes, operation)
                           : reduce<int32_t>(into, from, bytes, operation);
    case 3: return reduce<uint32_t>(into, from, bytes, operation);
    case 4:
      return operation < 2 ? reduce<uint64_t>(into, from, bytes, operation)
                           : reduce<int64_t>(into, from, bytes, operation);
    case 5: return reduce<uint64_t>(into, from, bytes, operation);
    case 7: return reduce<float>(into, from, bytes, operation);
    case 8: return reduce<double>(into, from, bytes, operation);
    default: break;
  }
  for (size_t i = 0; i < bytes / 2; ++i) {
    uint16_t a, b;
    memcpy(&a, into + 2 * i, 2);
    memcpy(&b, from + 2 * i, 2);
    a = type == 6 ? to_half(combine(from_half(a), from_half(b), operation))
                  : to_brain(combine(from_brain(a), from_brain(b), operation));
    memcpy(into + 2 * i, &a, 2);
  }
}
