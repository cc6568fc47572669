#include "kernels/update.h"

#include "kernels/device/queue.h"

namespace onnxpar {

using namespace cuda;

void Step::device(const Io& io, const Operands& o) const {
  const Tensor& p = o.from[0];
  StepTensors at{};
  at.gradient = o.from[1].data;
  for (size_t i = 0; i < o.to.size(); ++i) {
    at.from[i] = o.from[i == 0 ? 0 : i + 1].data;
    at.to[i] = o.to[i].data;
  }
  const size_t count = p.count();
  Queue queue(io, "update.cu", p.type);
  queue.launch(rule_.kernel, over(count, pack(p.type)), at, static_cast<Index>(count), o.scalars);
}

}  // namespace onnxpar
