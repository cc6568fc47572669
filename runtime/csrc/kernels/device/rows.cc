// Gradients of what normalises rows, on a GPU.
#include <algorithm>

#include "kernels/checks.h"
#include "kernels/device/kernels.h"
#include "kernels/device/queue.h"

namespace onnxpar::cuda {
namespace {

Compute softmax(int64_t axis, const std::string& kernel) {
  return [=](const Io& io) {
    const Softmax s = softmax_inputs(io, axis);
    Queue queue(io, "rows.cu", s.dy.type);
    void* dx = io.output(0, s.dy.shape);
    const auto n = static_cast<Index>(s.n);
    const auto outer = static_cast<Index>(s.outer);
    if (s.dy.count() == 0) return;
    if (s.inner != 1) {
      queue.launch((kernel + "_columns").c_str(), over(s.outer * s.inner), dx, s.dy.data,
                   s.y.data, outer, n, static_cast<Index>(s.inner));
      return;
    }
    const Team team = team_for(s.outer, s.n);
    queue.launch((kernel + team.suffix).c_str(), team.grid, dx, s.dy.data, s.y.data, outer, n);
  };
}

// Rows whose sums one block makes, few enough for many blocks, so many that at most kChunks sums
// are added at the end.
size_t chunk_of(size_t rows) {
  constexpr size_t kChunks = 128;
  constexpr size_t kRows = 64;
  return std::max(kRows, (rows + kChunks - 1) / kChunks);
}

}  // namespace

Compute softmax_grad(const KernelAttributes& attributes, size_t) {
  return softmax(attributes.integer("axis").value_or(-1), "softmax_grad");
}

Compute log_softmax_grad(const KernelAttributes& attributes, size_t) {
  return softmax(attributes.integer("axis").value_or(-1), "log_softmax_grad");
}

Compute layer_norm_grad(const KernelAttributes& attributes, size_t outputs) {
  const int64_t axis = attributes.integer("axis").value_or(-1);
  return [=](const Io& io) {
    const LayerNorm l = layer_norm_inputs(io, axis);
    const auto rows = static_cast<Index>(l.rows);
    const auto n = static_cast<Index>(l.n);
    const int mean_type = static_cast<int>(l.mean.type);
    const int inverse_type = static_cast<int>(l.inv_std.type);
    Queue queue(io, "rows.cu", l.x.type);
    void* dx = io.output(0, l.x.shape);
    void* dscale = outputs > 1 ? io.output(1, l.scale.shape) : nullptr;
    void* dbias = outputs > 2 ? io.output(2, l.scale.shape) : nullptr;
    if (dscale != nullptr || dbias != nullptr) {
      // Before dx, which may take the memory of dy.
      const size_t length = chunk_of(l.rows);
      const size_t chunks = (l.rows + length - 1) / length;
      const size_t real = l.x.type == DType::kFloat64 ? sizeof(double) : sizeof(float);
      std::byte* parts = queue.scratch<std::byte>(chunks * 2 * l.n * real);
      queue.launch("layer_norm_grad_columns", {(l.n + 31) / 32, chunks, 32, 8}, parts, l.dy.data,
                   l.x.data, l.mean.data, l.inv_std.data, mean_type, inverse_type, rows, n,
                   static_cast<Index>(length));
      queue.launch("layer_norm_grad_finish", over(2 * l.n), dscale, dbias, parts,
                   static_cast<Index>(chunks), n);
    }
    const Team team = team_for(l.rows, l.n);
    queue.launch((std::string("layer_norm_grad") + team.suffix).c_str(), team.grid, dx, l.dy.data,
                 l.x.data, l.scale.data, l.mean.data, l.inv_std.data, mean_type, inverse_type,
                 rows, n);
  };
}

}  // namespace onnxpar::cuda
