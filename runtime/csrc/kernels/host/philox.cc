#include "kernels/host/philox.h"

#include <stdexcept>
#include <string>

namespace onnxpar {
namespace {

uint32_t low(uint64_t x) { return static_cast<uint32_t>(x); }
uint32_t high(uint64_t x) { return static_cast<uint32_t>(x >> 32); }

// The four numbers that one evaluation of Philox gives, and which evaluation it was.
class Draws {
 public:
  Draws(const std::vector<int64_t>& key, Distribution distribution)
      : normal_(distribution == Distribution::kNormal), state_(philox_state(key)) {}

  float at(uint64_t element) {
    if (!valid_ || element / 4 != block_) fill(element / 4);
    return numbers_[element % 4];
  }

 private:
  void fill(uint64_t block) {
    const philox::Words words =
        philox::rounds({{low(block), high(block), state_.at[2], state_.at[3]}}, state_.at[0],
                       state_.at[1]);
    philox::numbers(words, normal_, numbers_);
    block_ = block;
    valid_ = true;
  }

  bool normal_;
  philox::Words state_;
  float numbers_[4] = {};
  uint64_t block_ = 0;
  bool valid_ = false;
};

}  // namespace

philox::Words philox_state(const std::vector<int64_t>& key) {
  const auto seed = static_cast<uint64_t>(key[0]);
  const auto step = static_cast<uint64_t>(key[1]);
  return philox::rounds({{low(step), high(step), low(static_cast<uint64_t>(key[2])),
                          low(static_cast<uint64_t>(key[3]))}},
                        low(seed), high(seed));
}

uint64_t philox_count(const std::vector<int64_t>& key, const std::vector<int64_t>& shape,
                      const std::vector<int64_t>& global, const std::vector<int64_t>& start) {
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
  for (size_t i = 0; i < rank; ++i) {
    if (shape[i] < 0 || global[i] < 0 || start[i] < 0) {
      throw std::invalid_argument("shape, global_shape and start must not be negative");
    }
  }
  const size_t count = product(shape);
  product(global);
  // The index of the block's last element, the largest.
  int64_t last = 0;
  for (size_t i = 0; i < rank && count != 0; ++i) {
    if (__builtin_mul_overflow(last, global[i], &last) ||
        __builtin_add_overflow(last, start[i], &last) ||
        __builtin_add_overflow(last, shape[i] - 1, &last)) {
      throw std::invalid_argument("start " + to_text(start) + " and shape " + to_text(shape) +
                                  " reach beyond 2^63 elements of global_shape " +
                                  to_text(global));
    }
  }
  return count;
}

void philox_fill(float* out, const std::vector<int64_t>& key, const std::vector<int64_t>& shape,
                 const std::vector<int64_t>& global, const std::vector<int64_t>& start,
                 Distribution distribution) {
  const uint64_t count = philox_count(key, shape, global, start);
  const size_t rank = shape.size();
  if (count == 0) return;
  Draws draws(key, distribution);
  if (rank == 0) {
    *out = draws.at(0);
    return;
  }
  const uint64_t run = static_cast<uint64_t>(shape[rank - 1]);
  std::vector<int64_t> index(rank, 0);
  for (uint64_t done = 0; done < count; done += run) {
    uint64_t element = 0;
    for (size_t i = 0; i < rank; ++i) {
      element = element * static_cast<uint64_t>(global[i]) +
                static_cast<uint64_t>(start[i]) + static_cast<uint64_t>(index[i]);
    }
    for (uint64_t i = 0; i < run; ++i) *out++ = draws.at(element + i);
    for (size_t d = rank - 1; d-- > 0;) {
      if (++index[d] < shape[d]) break;
      index[d] = 0;
    }
  }
}

}  // namespace onnxpar
