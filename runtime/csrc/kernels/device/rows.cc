#include "kernels/rows.h"

#include <algorithm>

#include "kernels/device/queue.h"
#include "kernels/device/rows.cuh"

namespace onnxpar {

using namespace cuda;

namespace {

// Rows whose sums one block makes, few enough for many blocks, so many that at most kChunks sums
// are added at the end.
size_t chunk_of(size_t rows) {
  constexpr size_t kChunks = 128;
  constexpr size_t kRows = 64;
  return std::max(kRows, (rows + kChunks - 1) / kChunks);
}

}  // namespace

void SoftmaxGrad::device(const Io& io, const Operands& o) const {
  if (o.dy.count() == 0) return;
  Queue queue(io, "rows.cu", o.dy.type);
  const std::string kernel = rule_.kernel;
  const auto n = static_cast<Index>(o.n);
  const auto outer = static_cast<Index>(o.outer);
  if (o.inner != 1) {
    queue.launch((kernel + "_columns").c_str(), over(o.outer * o.inner), o.dx.data, o.dy.data,
                 o.y.data, outer, n, static_cast<Index>(o.inner));
    return;
  }
  const Team team = team_for(o.outer, o.n);
  queue.launch((kernel + team.suffix).c_str(), team.grid, o.dx.data, o.dy.data, o.y.data, outer,
               n);
}

void NormGrad::device(const Io& io, const Operands& o) const {
  const Norm l{o.dy.data,
                    o.x.data,
                    o.scale.data,
                    o.mean.data,
                    o.inv_std.data,
                    static_cast<int>(o.mean.type),
                    static_cast<int>(o.inv_std.type),
                    static_cast<Index>(o.rows),
                    static_cast<Index>(o.n)};
  Queue queue(io, "rows.cu", o.x.type);
  const std::string kernel = rule_.kernel;
  const size_t width = (rule_.centred ? 2 : 1) * o.n;
  if (o.sums[0].data != nullptr || o.sums[1].data != nullptr) {
    // Before dx, which may take the memory of dy.
    const size_t length = chunk_of(o.rows);
    const size_t chunks = (o.rows + length - 1) / length;
    std::byte* parts = queue.scratch<std::byte>(chunks * width * real_size(o.x.type));
    queue.launch((kernel + "_columns").c_str(),
                 {(o.n + kTileColumns - 1) / kTileColumns, chunks, kTileColumns, kTileRows}, parts,
                 l, static_cast<Index>(length));
    queue.launch("norm_grad_finish", over(width), o.sums[0].data, o.sums[1].data, parts,
                 static_cast<Index>(chunks), l.n, static_cast<Index>(width));
  }
  const Team team = team_for(o.rows, o.n);
  queue.launch((kernel + team.suffix).c_str(), team.grid, o.dx.data, l);
}

}  // namespace onnxpar
