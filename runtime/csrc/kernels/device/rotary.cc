#include "kernels/rotary.h"

#include "kernels/device/queue.h"

namespace onnxpar {

using namespace cuda;

void Rotary::device(const Io& io, const Operands& o) const {
  Queue queue(io, "rotary.cu", o.x.type);
  queue.launch(rule_.kernel, over(o.rows * o.half), o.y.data, o.x.data, o.cos.data, o.sin.data,
               o.angles, static_cast<Index>(o.rows), static_cast<Index>(o.half));
}

}  // namespace onnxpar
