#include "kernels/filters.h"

#include "kernels/device/queue.h"

namespace onnxpar {

using namespace cuda;

void TurnedWeights::device(const Io& io, const Operands& o) const {
  Queue queue(io, "filters.cu", o.w.type);
  queue.launch("turned_weights", over(o.w.count()), o.y.data, o.w.data,
               static_cast<Index>(o.groups), static_cast<Index>(o.many),
               static_cast<Index>(o.few), static_cast<Index>(o.taps));
}

}  // namespace onnxpar
