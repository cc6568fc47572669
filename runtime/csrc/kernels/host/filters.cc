#include "kernels/filters.h"

#include <algorithm>

namespace onnxpar {
namespace {

// Channels in a tile: both sides of a tile of 3 x 3 filters fit into the first cache.
constexpr size_t kTile = 16;

// `columns` from `first` on, of a group. kTaps is the number of taps where it is known, else 0.
template <class T, size_t kTaps>
void turn(T* to, const T* from, const TurnedWeights::Operands& o, size_t first, size_t columns) {
  const size_t taps = kTaps == 0 ? o.taps : kTaps;
  for (size_t begin = 0; begin < o.many; begin += kTile) {
    const size_t end = std::min(o.many, begin + kTile);
    for (size_t c = first; c < first + columns; ++c) {
      for (size_t m = begin; m < end; ++m) {
        const T* x = from + (m * o.few + c) * taps;
        T* y = to + (c * o.many + m) * taps;
        for (size_t k = 0; k < taps; ++k) y[k] = x[taps - 1 - k];
      }
    }
  }
}

template <class T>
void turn_all(const Io& io, const TurnedWeights::Operands& o) {
  const size_t tiles = (o.few + kTile - 1) / kTile;
  const size_t each = o.many * o.few * o.taps;
  if (each == 0) return;
  const auto loop = o.taps == 1 ? turn<T, 1> : o.taps == 9 ? turn<T, 9> : turn<T, 0>;
  const size_t piece = std::max<size_t>(1, kPiece * tiles / each);
  pieces(io, o.groups * tiles, piece, [&](size_t begin, size_t count) {
    for (size_t i = begin; i < begin + count; ++i) {
      const size_t start = i / tiles * each;
      const size_t first = i % tiles * kTile;
      loop(static_cast<T*>(o.y.data) + start, static_cast<const T*>(o.w.data) + start, o, first,
           std::min(kTile, o.few - first));
    }
  });
}

}  // namespace

void TurnedWeights::host(const Io& io, const Operands& o) const {
  switch (dtype_size(o.w.type)) {
    case 2: return turn_all<uint16_t>(io, o);
    case 4: return turn_all<uint32_t>(io, o);
    default: return turn_all<uint64_t>(io, o);
  }
}

}  // namespace onnxpar
