// Counter-based random numbers: every element is a function of a key and its global index.
#pragma once

#include <cstdint>
#include <vector>

#include "abi/values.h"
#include "kernels/device/philox.cuh"

namespace onnxpar {

enum class Distribution { kUniform, kNormal };

// The key's own numbers, of which every element's are made. See philox_fill.
philox::Words philox_state(const std::vector<int64_t>& key);

// Checks what philox_fill is given and returns the number of elements. Throws
// std::invalid_argument.
uint64_t philox_count(const std::vector<int64_t>& key, const std::vector<int64_t>& shape,
                      const std::vector<int64_t>& global, const std::vector<int64_t>& start);

// Fills `out`, of shape `shape`, with the block of a global array of shape `global` that begins at
// `start`; all three have as many dims. `key` is (seed, step, micro_batch, node), of which the last
// two must fit in 32 bits.
//
// The 256 bits of the key do not fit in one Philox key and what the index leaves of its counter, so
// they go through Philox once: s = philox(counter (step low, step high, micro_batch, node), key
// (seed low, seed high)). Element e, its row-major index in the global array, is word e mod 4 of
// philox(counter (low and high half of e div 4, s[2], s[3]), key (s[0], s[1])).
//
// Uniform: the upper 24 bits of the word times 2^-24, in [0, 1). Normal: elements e and e + 1, with
// e even, are the cosine and sine branch of Box and Muller's transform of their two words, computed
// in double by operations that are the same on every device. A block may reach past the global array
// (padding); what lies there has no meaning. Throws std::invalid_argument.
void philox_fill(float* out, const std::vector<int64_t>& key, const std::vector<int64_t>& shape,
                 const std::vector<int64_t>& global, const std::vector<int64_t>& start,
                 Distribution distribution);

}  // namespace onnxpar
