// Gradient of Gather: rows added where they were taken from.
#include <algorithm>
#include <cstring>

#include "kernels/checks.h"
#include "kernels/device/kernels.h"

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

Compute gather_grad(const Attributes& attributes, size_t) {
  const int64_t axis = attributes.integer("axis").value_or(0);
  return [=](const Io& io) {
    const Gather inputs = gather_inputs(io, axis);
    const size_t outer = inputs.outer;
    const size_t rows = inputs.rows;
    const size_t inner = inputs.inner;
    const size_t count = inputs.count;
    const Tensor& data = inputs.data;
    const size_t block = std::max<size_t>(1, kPiece / std::max<size_t>(inner, 1));
    const Sorted order = sorted(inputs.indices.integers(), rows, block);
    with_real(data, "data", [&](auto zero) {
      using T = decltype(zero);
      const Reader<T> from(inputs.dy, "dy");
      Writer<T> out(io, 0, data.shape, data.type);
      const auto add = simd().of<T>().add;
      const size_t blocks = order.begin.size() - 1;
      pieces(io, inner == 0 ? 0 : outer * blocks, 1, [&](size_t index, size_t) {
        const size_t which = index % blocks;
        const size_t slab = index / blocks;
        T* to = out.data() + slab * rows * inner;
        const size_t first = which * block;
        std::memset(to + first * inner, 0, std::min(block, rows - first) * inner * sizeof(T));
        for (size_t i = order.begin[which]; i < order.begin[which + 1]; ++i) {
          const Taken& taken = order.taken[i];
          add(to + taken.row * inner, from.data() + (slab * count + taken.from) * inner, inner);
        }
      });
      out.finish();
    });
  };
}

}  // namespace

const std::vector<KernelSpec>& gather_kernels() {
  static const std::vector<KernelSpec> all = {
      {"GatherGrad",
       {kAny, kInt64, kAny},
       0,
       false,
       {{2}},
       false,
       never_in_place,
       gather_grad,
       cuda::gather_grad},
  };
  return all;
}

}  // namespace onnxpar
