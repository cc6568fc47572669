#include "philox.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace onnxpar {
namespace {

constexpr double kTwoPi = 6.283185307179586476925286766559;

uint32_t low(uint64_t x) { return static_cast<uint32_t>(x); }
uint32_t high(uint64_t x) { return static_cast<uint32_t>(x >> 32); }

// The four numbers that one evaluation of Philox gives, and which evaluation it was.
class Stream {
 public:
  Stream(const std::vector<int64_t>& key, Distribution distribution)
      : distribution_(distribution) {
    const auto step = static_cast<uint64_t>(key[1]);
    const auto seed = static_cast<uint64_t>(key[0]);
    state_ = philox4x32({low(step), high(step), low(static_cast<uint64_t>(key[2])),
                         low(static_cast<uint64_t>(key[3]))},
                        {low(seed), high(seed)});
  }

  float at(uint64_t element) {
    if (!valid_ || element / 4 != block_) fill(element / 4);
    return numbers_[element % 4];
  }

 private:
  void fill(uint64_t block) {
    const auto words =
        philox4x32({low(block), high(block), state_[2], state_[3]}, {state_[0], state_[1]});
    for (size_t i = 0; i < 4; i += 2) {
      if (distribution_ == Distribution::kUniform) {
        numbers_[i] = static_cast<float>(words[i] >> 8) * 0x1p-24f;
        numbers_[i + 1] = static_cast<float>(words[i + 1] >> 8) * 0x1p-24f;
        continue;
      }
      const double u = (static_cast<double>(words[i]) + 1.0) * 0x1p-32;  // in (0, 1]
      const double angle = kTwoPi * (static_cast<double>(words[i + 1]) * 0x1p-32);
      const double radius = std::sqrt(-2.0 * std::log(u));
      numbers_[i] = static_cast<float>(radius * std::cos(angle));
      numbers_[i + 1] = static_cast<float>(radius * std::sin(angle));
    }
    block_ = block;
    valid_ = true;
  }

  Distribution distribution_;
  std::array<uint32_t, 4> state_{};
  std::array<float, 4> numbers_{};
  uint64_t block_ = 0;
  bool valid_ = false;
};

}  // namespace

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * c[2];
    c = {high(b) ^ c[1] ^ k[0], low(b), high(a) ^ c[3] ^ k[1], low(a)};
    k = {k[0] + 0x9E3779B9u, k[1] + 0xBB67AE85u};
  }
  return c;
}

void philox_fill(float* out, const std::vector<int64_t>& key, const std::vector<int64_t>& shape,
                 const std::vector<int64_t>& global, const std::vector<int64_t>& start,
                 Distribution distribution) {
  if (key.size() != 4) {
    throw std::invalid_argument("key: expected 4 numbers (seed, step, micro_batch, node), got " +
                                std::to_string(key.size()));
  }
  for (size_t i = 2; i < 4; ++i) {
    if (key[i] < 0 || key[i] > int64_t{0xffffffff}) {
      throw std::invalid_argument("key: micro_batch and node must be in [0, 2^32), got " +
                                  std::to_string(key[i]));
    }
  }
  const size_t rank = shape.size();
  if (global.size() != rank || start.size() != rank) {
    throw std::invalid_argument("shape, global_shape and start: expected equal lengths, got " +
                                std::to_string(rank) + ", " + std::to_string(global.size()) +
                                " and " + std::to_string(start.size()));
  }
  uint64_t count = 1;
  for (size_t i = 0; i < rank; ++i) {
    if (shape[i] < 0 || global[i] < 0 || start[i] < 0) {
      throw std::invalid_argument("shape, global_shape and start must not be negative");
    }
    count *= static_cast<uint64_t>(shape[i]);
  }
  if (count == 0) return;
  Stream stream(key, distribution);
  if (rank == 0) {
    *out = stream.at(0);
    return;
  }
  const uint64_t run = static_cast<uint64_t>(shape[rank - 1]);
  std::vector<int64_t> index(rank, 0);
  for (uint64_t done = 0; done < count; done += run) {
    uint64_t element = 0;
    for (size_t i = 0; i < rank; ++i) {
      element = element * static_cast<uint64_t>(global[i]) +
                static_cast<uint64_t>(start[i] + index[i]);
    }
    for (uint64_t i = 0; i < run; ++i) *out++ = stream.at(element + i);
    for (size_t d = rank - 1; d-- > 0;) {
      if (++index[d] < shape[d]) break;
      index[d] = 0;
    }
  }
}

}  // namespace onnxpar
