// Gradient of Gather, on a GPU: the places are sorted by row, then rows are added side by side.
#include "kernels/gather.h"

#include <algorithm>
#include <limits>

#include "kernels/device/gather.cuh"

namespace onnxpar {
namespace {

using namespace cuda;

size_t up(size_t count, size_t each) { return (count + each - 1) / each; }

// The places in the order of their rows.
Place* sorted(Queue& queue, const GatherGrad::Operands& g, Fault* fault) {
  Place* places = queue.scratch<Place>(g.count);
  Place* other = queue.scratch<Place>(g.count);
  const size_t tiles = up(g.count, kTile);
  unsigned* totals = queue.scratch<unsigned>(kDigits * tiles);
  const auto count = static_cast<Index>(g.count);
  queue.launch("gather_rows", over(g.count), places, g.indices.data, count,
               static_cast<Index>(g.rows), fault);
  // An index that is out of range counts as row `rows`.
  for (int shift = 0; g.rows >> shift != 0; shift += 8) {
    queue.launch("gather_count", {tiles}, totals, places, count, shift);
    queue.launch("gather_scan", {1}, totals, static_cast<Index>(kDigits * tiles));
    queue.launch("gather_move", {tiles}, other, places, totals, count, shift);
    std::swap(places, other);
  }
  return places;
}

}  // namespace

void GatherGrad::device(const Io& io, const Operands& g) const {
  Fault* fault = faults_->next(io.stream(), g.rows);
  constexpr size_t kMost = std::numeric_limits<int32_t>::max();
  if (g.rows >= kMost || g.count >= kMost) {
    throw std::invalid_argument("data has " + std::to_string(g.rows) + " rows and indices " +
                                std::to_string(g.count) +
                                " elements, expected fewer than 2^31 on a GPU");
  }
  Queue queue(io, "gather.cu", g.dx.type);
  const size_t columns = g.outer * g.inner;
  queue.zero(g.dx.data, columns * g.rows * dtype_size(g.dx.type));
  if (g.count == 0 || columns == 0) return;
  const Place* places = sorted(queue, g, fault);
  const size_t runs = up(g.count, kRun);
  std::byte* parts = queue.scratch<std::byte>(runs * 2 * columns * real_size(g.dx.type));
  const Sums sums{static_cast<Index>(g.count), static_cast<Index>(g.rows),
                  static_cast<Index>(g.outer), static_cast<Index>(g.inner)};
  const Grid grid{up(columns, 32), std::min<size_t>(up(runs, 8), 65535), 32, 8};
  queue.launch("gather_sums", grid, g.dx.data, parts, g.dy.data, places, sums);
  queue.launch("gather_join", grid, g.dx.data, parts, places, sums);
}

}  // namespace onnxpar
