// Gradient of Gather: rows added where they were taken from.
#include <algorithm>
#include <cstring>

#include "kernels/gather.h"
#include "kernels/host/simd.h"

namespace onnxpar {
namespace {

struct Taken {
  size_t from;  // the place in `indices`
  size_t row;   // the row of the data
};

// The indices in the order of the blocks of rows that they fall into, and in their own order within
// a block; where each block begins, and the end.
struct Sorted {
  std::vector<Taken> taken;
  std::vector<size_t> begin;
};

Sorted sorted(const std::vector<int64_t>& indices, size_t rows, size_t block) {
  const int64_t limit = static_cast<int64_t>(rows);
  Sorted s;
  s.taken.resize(indices.size());
  s.begin.resize((rows + block - 1) / block + 1);
  for (size_t i = 0; i < indices.size(); ++i) {
    if (indices[i] < -limit || indices[i] >= limit) {
      throw std::invalid_argument("index " + std::to_string(i) + " is " +
                                  std::to_string(indices[i]) + ", expected one of " +
                                  std::to_string(rows) + " rows");
    }
    const int64_t row = indices[i] < 0 ? indices[i] + limit : indices[i];
    ++s.begin[static_cast<size_t>(row) / block + 1];
  }
  for (size_t i = 1; i < s.begin.size(); ++i) s.begin[i] += s.begin[i - 1];
  std::vector<size_t> next = s.begin;
  for (size_t i = 0; i < indices.size(); ++i) {
    const size_t row = static_cast<size_t>(indices[i] < 0 ? indices[i] + limit : indices[i]);
    s.taken[next[row / block]++] = {i, row};
  }
  return s;
}

}  // namespace

void GatherGrad::host(const Io& io, const Operands& g) const {
  const size_t block = std::max<size_t>(1, kPiece / std::max<size_t>(g.inner, 1));
  const Sorted order = sorted(g.indices.integers(), g.rows, block);
  with_real(g.dy, "dy", [&](auto zero) {
    using T = decltype(zero);
    const Reader<T> from(g.dy, "dy");
    Writer<T> out(g.dx);
    const auto add = simd().of<T>().add;
    const size_t blocks = order.begin.size() - 1;
    pieces(io, g.inner == 0 ? 0 : g.outer * blocks, 1, [&](size_t index, size_t) {
      const size_t which = index % blocks;
      const size_t slab = index / blocks;
      T* to = out.data() + slab * g.rows * g.inner;
      const size_t first = which * block;
      std::memset(to + first * g.inner, 0,
                  std::min(block, g.rows - first) * g.inner * sizeof(T));
      for (size_t i = order.begin[which]; i < order.begin[which + 1]; ++i) {
        const Taken& taken = order.taken[i];
        add(to + taken.row * g.inner, from.data() + (slab * g.count + taken.from) * g.inner,
            g.inner);
      }
    });
    out.finish();
  });
}

}  // namespace onnxpar
