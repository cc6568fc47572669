#include "kernels/channels.h"

#include <algorithm>
#include <vector>

#include "kernels/host/simd.h"

namespace onnxpar {
namespace {

// Calls body(channel, start) for each run of elements, the runs of a channel one after another on
// one thread.
template <class Body>
void runs(const Io& io, const Channels& of, const Body& body) {
  const size_t each = std::max<size_t>(1, of.outer * of.inner);
  pieces(io, of.channels, std::max<size_t>(1, kPiece / each), [&](size_t begin, size_t count) {
    for (size_t channel = begin; channel < begin + count; ++channel) {
      for (size_t n = 0; n < of.outer; ++n) {
        body(channel, (n * of.channels + channel) * of.inner);
      }
    }
  });
}

// The same where a channel's runs are single elements, as behind a linear layer: calls
// body(channel, count) for neighbouring channels, whose elements lie side by side.
template <class Body>
void columns(const Io& io, const Channels& of, const Body& body) {
  pieces(io, of.channels, kColumns, body);
}

// Rows that are added up by themselves, so that the error does not grow with the number of rows.
constexpr size_t kRows = 256;

}  // namespace

void ChannelSums::host(const Io& io, const Operands& o) const {
  with_real(o.x, "x", [&](auto zero) {
    using T = decltype(zero);
    const Reader<T> from(o.dy, "dy");
    const Reader<T> at_x(o.x, "x");
    const Reader<T> mean(o.mean, "mean");
    const auto& loops = simd().of<T>();
    const size_t outputs = squares_ ? 1 : 2;
    std::vector<T> sums(2 * o.of.channels);
    const auto side_by_side = [&](size_t channel, size_t count) {
      const T* const middle = mean.data() + channel;
      for (size_t first = 0; first < o.of.outer; first += kRows) {
        T total[kColumns] = {};
        T along[kColumns] = {};
        for (size_t n = first; n < std::min(first + kRows, o.of.outer); ++n) {
          const T* const x = at_x.data() + n * o.of.channels + channel;
          const T* const dy = from.data() + n * o.of.channels + channel;
          for (size_t i = 0; squares_ && i < count; ++i) {
            total[i] += (x[i] - middle[i]) * (x[i] - middle[i]);
          }
          for (size_t i = 0; !squares_ && i < count; ++i) {
            total[i] += dy[i];
            along[i] += dy[i] * (x[i] - middle[i]);
          }
        }
        loops.add(sums.data() + channel, total, count);
        loops.add(sums.data() + o.of.channels + channel, along, count);
      }
    };
    if (o.of.inner == 1) columns(io, o.of, side_by_side);
    else runs(io, o.of, [&](size_t channel, size_t start) {
      T* to = sums.data() + channel;
      const T* x = at_x.data() + start;
      if (squares_) {
        *to += loops.centred_square_sum(x, mean.data()[channel], o.of.inner);
      } else {
        loops.channel_sums(to, to + o.of.channels, from.data() + start, x, mean.data()[channel],
                           o.of.inner);
      }
    });
    for (size_t i = 0; i < outputs; ++i) {
      Writer<T> out(o.sums[i]);
      std::copy_n(sums.data() + i * o.of.channels, o.of.channels, out.data());
      out.finish();
    }
  });
}

void BatchNormInputGrad::host(const Io& io, const Operands& o) const {
  with_real(o.x, "x", [&](auto zero) {
    using T = decltype(zero);
    const Reader<T> from(o.dy, "dy");
    const Reader<T> at_x(o.x, "x");
    const Reader<T> scale(o.vectors[kScale], "scale");
    const Reader<T> mean(o.vectors[kMean], "mean");
    const Reader<T> inverse(o.vectors[kInverse], "inv_std");
    const Reader<T> total(o.vectors[kTotal], "total");
    const Reader<T> slope(o.vectors[kSlope], "slope");
    const Reader<T> counts(o.count, "count");
    const T count = *counts.data();
    Writer<T> dx(o.dx);
    const auto& loops = simd().of<T>();
    const auto side_by_side = [&](size_t channel, size_t width) {
      T mean_dy[kColumns], bend[kColumns], step[kColumns];
      for (size_t i = 0; i < width; ++i) {
        const T inv_std = inverse.data()[channel + i];
        mean_dy[i] = total.data()[channel + i] / count;
        bend[i] = slope.data()[channel + i] / count * inv_std;
        step[i] = scale.data()[channel + i] * inv_std;
      }
      const T* const middle = mean.data() + channel;
      for (size_t n = 0; n < o.of.outer; ++n) {
        const size_t start = n * o.of.channels + channel;
        const T* const x = at_x.data() + start;
        const T* const dy = from.data() + start;
        T* const to = dx.data() + start;
        for (size_t i = 0; i < width; ++i) {
          to[i] = step[i] * (dy[i] - mean_dy[i] - (x[i] - middle[i]) * bend[i]);
        }
      }
    };
    if (o.of.inner == 1) columns(io, o.of, side_by_side);
    else runs(io, o.of, [&](size_t channel, size_t start) {
      const T inv_std = inverse.data()[channel];
      loops.batch_norm_grad(dx.data() + start, from.data() + start, at_x.data() + start,
                            mean.data()[channel], total.data()[channel] / count,
                            slope.data()[channel] / count * inv_std,
                            scale.data()[channel] * inv_std, o.of.inner);
    });
    dx.finish();
  });
}

}  // namespace onnxpar
