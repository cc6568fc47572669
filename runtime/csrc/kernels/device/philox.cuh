// Philox and what is made of it, for the host and for devices: one text for both, in which every
// operation is one of IEEE 754 (no fused multiply-add, no library function), so that both come to
// the same bits. It must be compiled without contraction of products and sums.
#pragma once

#if !defined(__CUDACC_RTC__) && !defined(__device__)
#define __device__
#define ONNXPAR_ON_HOST
#endif

namespace philox {

using Word = unsigned int;
using Long = unsigned long long;

struct Words {
  Word at[4];
};

// Philox4x32 with 10 rounds: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel Random
// Numbers: As Easy as 1, 2, 3", SC 2011.
__device__ inline Words rounds(Words c, Word k0, Word k1) {
  for (int round = 0; round < 10; ++round) {
    const Long a = Long{0xD2511F53u} * c.at[0];
    const Long b = Long{0xCD9E8D57u} * c.at[2];
    c = {{static_cast<Word>(b >> 32) ^ c.at[1] ^ k0, static_cast<Word>(b),
          static_cast<Word>(a >> 32) ^ c.at[3] ^ k1, static_cast<Word>(a)}};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

__device__ inline double from_bits(Long bits) {
#if defined(ONNXPAR_ON_HOST)
  double x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
#else
  return __longlong_as_double(static_cast<long long>(bits));
#endif
}

// -2 log((word + 1) / 2^32). With (word + 1) = m 2^e, m in [1/sqrt(2), sqrt(2)), and
// s = (m - 1) / (m + 1): log(m) = 2 (s + s^3/3 + s^5/5 + ...), |s| <= 0.1716; what is left out is
// below 1e-18 of it.
__device__ inline double minus_2_log(Word word) {
  const Long value = static_cast<Long>(word) + 1;
  int e = 0;
  for (int shift = 16; shift > 0; shift /= 2) {
    if (value >> (e + shift)) e += shift;
  }
  if (value >> 32) e = 32;
  double m = static_cast<double>(value) * from_bits(static_cast<Long>(1023 - e) << 52);
  if (m > 1.4142135623730951) {
    m = m * 0.5;
    ++e;
  }
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double p = 1.0 / 23;
  for (int k = 21; k >= 3; k -= 2) p = p * z + 1.0 / k;
  const double log_m = 2.0 * s + 2.0 * s * (z * p);
  const double log_2 = static_cast<double>(e - 32) * 0.69314718055994530942;
  return -2.0 * (log_2 + log_m);
}

// Cosine and sine of word / 2^32 turns: the nearest eighth of a turn is taken off exactly, and the
// rest, at most 1/16 of a turn, goes through Taylor's series, whose remainder is below 1e-17.
__device__ inline void turn(Word word, double* cosine, double* sine) {
  const Word eighth = (word + 0x10000000u) >> 29;
  const int rest = static_cast<int>(word - (eighth << 29));
  const double x = static_cast<double>(rest) * (6.28318530717958647693 / 4294967296.0);
  const double z = x * x;
  double c = 1.0;
  double s = 1.0;
  for (int k = 14; k >= 2; k -= 2) {
    c = 1.0 - z * c * (1.0 / (k * (k - 1)));
    s = 1.0 - z * s * (1.0 / (k * (k + 1)));
  }
  s = s * x;
  constexpr double kRoot = 0.70710678118654752440;
  if (eighth % 2 != 0) {  // (c, s) turned by an eighth
    const double turned = kRoot * (c - s);
    s = kRoot * (c + s);
    c = turned;
  }
  switch (eighth / 2) {
    case 0: *cosine = c, *sine = s; break;
    case 1: *cosine = -s, *sine = c; break;
    case 2: *cosine = -c, *sine = -s; break;
    default: *cosine = s, *sine = -c; break;
  }
}

__device__ inline double square_root(double x) {
#if defined(ONNXPAR_ON_HOST)
  return __builtin_sqrt(x);
#else
  return sqrt(x);
#endif
}

// The four numbers of a block: see philox_fill.
__device__ inline void numbers(const Words& words, bool normal, float (&to)[4]) {
  for (int i = 0; i < 4; i += 2) {
    if (!normal) {
      to[i] = static_cast<float>(words.at[i] >> 8) * (1.0f / 16777216.0f);
      to[i + 1] = static_cast<float>(words.at[i + 1] >> 8) * (1.0f / 16777216.0f);
      continue;
    }
    const double radius = square_root(minus_2_log(words.at[i]));
    double cosine, sine;
    turn(words.at[i + 1], &cosine, &sine);
    to[i] = static_cast<float>(radius * cosine);
    to[i + 1] = static_cast<float>(radius * sine);
  }
}

}  // namespace philox
