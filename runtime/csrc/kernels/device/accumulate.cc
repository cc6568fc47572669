#include "kernels/accumulate.h"

#include "abi/cuda_memory.h"
#include "kernels/device/queue.h"

namespace onnxpar {

using namespace cuda;

void Accumulate::device(const Io& io, const Operands& o) const {
  for (const auto& [gradient, sum] : o.pairs) {
    const Tensor& to = o.later ? sum : gradient;
    const Tensor& from = o.later ? gradient : sum;
    void* const target = const_cast<void*>(to.data);
    if (o.later && !o.earlier) {
      cuda::copy(target, from.data, from.bytes(), io.stream());
      continue;
    }
    const size_t count = to.count();
    Queue queue(io, "accumulate.cu", to.type);
    queue.launch("accumulate", over(count, pack(to.type)), target, from.data,
                 static_cast<Index>(count));
  }
}

}  // namespace onnxpar
