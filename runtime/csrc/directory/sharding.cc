#include "directory/sharding.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace onnxpar {
namespace {

// Copies a box from one array to another; its sizes, and its first elements in both.
struct BoxCopy {
  std::vector<int64_t> box;
  std::vector<int64_t> from_sizes, from_start;
  std::vector<int64_t> to_sizes, to_start;
  size_t bytes;

  void run(size_t dim, const char* from, char* to) const {
    if (dim == box.size()) {
      std::memcpy(to, from, bytes);
      return;
    }
    size_t from_step = bytes;
    size_t to_step = bytes;
    for (size_t i = dim + 1; i < box.size(); ++i) {
      from_step *= static_cast<size_t>(from_sizes[i]);
      to_step *= static_cast<size_t>(to_sizes[i]);
    }
    from += from_step * static_cast<size_t>(from_start[dim]);
    to += to_step * static_cast<size_t>(to_start[dim]);
    const bool complete = dim + 1 == box.size() || (from_step == to_step && is_complete(dim + 1));
    if (complete) {
      std::memcpy(to, from, from_step * static_cast<size_t>(box[dim]));
      return;
    }
    for (int64_t i = 0; i < box[dim]; ++i, from += from_step, to += to_step) run(dim + 1, from, to);
  }

  bool is_complete(size_t first) const {
    for (size_t i = first; i < box.size(); ++i) {
      if (box[i] != from_sizes[i] || box[i] != to_sizes[i]) return false;
    }
    return true;
  }
};

constexpr int64_t kMostElements = int64_t{1} << 62;  // so that rounding up does not overflow

int64_t times(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) throw std::runtime_error("a tensor is too large");
  return product;
}

}  // namespace

std::vector<int> coordinates(int rank, const std::vector<int>& atoms) {
  std::vector<int> digits(atoms.size());
  for (size_t i = atoms.size(); i-- > 0; rank /= atoms[i]) digits[i] = rank % atoms[i];
  return digits;
}

bool Shard::padded() const {
  return std::any_of(blocks.begin(), blocks.end(),
                     [](const DimBlock& block) { return block.valid < block.local; });
}

void Shard::take(const void* from, void* to, size_t element_bytes) const {
  BoxCopy copy{{}, sizes, {}, {}, std::vector<int64_t>(sizes.size(), 0), element_bytes};
  for (const DimBlock& block : blocks) {
    if (block.valid == 0) return;
    copy.box.push_back(block.valid);
    copy.from_start.push_back(block.start);
    copy.to_sizes.push_back(block.local);
  }
  copy.run(0, static_cast<const char*>(from), static_cast<char*>(to));
}

void Shard::put(const void* from, void* to, size_t element_bytes) const {
  BoxCopy copy{{}, {}, std::vector<int64_t>(sizes.size(), 0), sizes, {}, element_bytes};
  for (const DimBlock& block : blocks) {
    if (block.valid == 0) return;
    copy.box.push_back(block.valid);
    copy.from_sizes.push_back(block.local);
    copy.to_start.push_back(block.start);
  }
  copy.run(0, static_cast<const char*>(from), static_cast<char*>(to));
}

Shard shard_of(const std::vector<std::vector<DimComponent>>& dims, const Values& values,
               const std::vector<int>& atoms, int rank) {
  const std::vector<int> place = coordinates(rank, atoms);
  Shard shard;
  for (const auto& components : dims) {
    int64_t whole = 1;
    int64_t local_size = 1;
    for (const DimComponent& component : components) {
      const int64_t size = evaluate(component.size, values);
      if (size < 0 || size > kMostElements) {
        throw std::runtime_error("the size '" + component.size + "' is " + std::to_string(size));
      }
      DimBlock block{0, size, size};
      for (const int atom : component.atoms) {
        const auto index = static_cast<size_t>(atom);
        block.local = (block.local + atoms[index] - 1) / atoms[index];
        block.start += place[index] * block.local;
        block.valid =
            std::min(std::max<int64_t>(block.valid - place[index] * block.local, 0), block.local);
      }
      shard.sizes.push_back(size);
      shard.blocks.push_back(block);
      whole = times(whole, size);
      local_size = times(local_size, block.local);
    }
    shard.whole.push_back(whole);
    shard.local.push_back(local_size);
  }
  return shard;
}

}  // namespace onnxpar
