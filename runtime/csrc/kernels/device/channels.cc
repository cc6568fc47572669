#include "kernels/channels.h"

#include <string>

#include "kernels/device/channels.cuh"
#include "kernels/device/queue.h"

namespace onnxpar {

using namespace cuda;

namespace {

ChannelRuns runs_of(const Channels& of) {
  return {static_cast<Index>(of.outer), static_cast<Index>(of.channels),
          static_cast<Index>(of.inner)};
}

}  // namespace

void ChannelSums::device(const Io& io, const Operands& o) const {
  Queue queue(io, "channels.cu", o.x.type);
  const Team team = team_for(o.of.channels, o.of.outer * o.of.inner);
  if (squares_) {
    queue.launch((std::string("channel_square_sum") + team.suffix).c_str(), team.grid,
                 o.sums[0].data, o.x.data, o.mean.data, runs_of(o.of));
  } else {
    queue.launch((std::string("channel_sums") + team.suffix).c_str(), team.grid, o.sums[0].data,
                 o.sums[1].data, o.dy.data, o.x.data, o.mean.data, runs_of(o.of));
  }
}

void BatchNormInputGrad::device(const Io& io, const Operands& o) const {
  const BatchNormGrad g{o.dy.data,
                        o.x.data,
                        o.vectors[kScale].data,
                        o.vectors[kMean].data,
                        o.vectors[kInverse].data,
                        o.vectors[kTotal].data,
                        o.vectors[kSlope].data,
                        o.count.data};
  Queue queue(io, "channels.cu", o.x.type);
  queue.launch("batch_norm_grad", over(o.x.count()), o.dx.data, g, runs_of(o.of));
}

}  // namespace onnxpar
