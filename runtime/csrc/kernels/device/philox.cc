#include "kernels/philox.h"

#include <stdexcept>

#include "kernels/device/queue.h"
#include "kernels/device/runs.cuh"

namespace onnxpar {

using namespace cuda;

namespace {

// The block as runs of elements that are neighbours in the global array as well; dims that do not
// tell anything are left out.
Runs runs_of(const std::vector<int64_t>& shape, const std::vector<int64_t>& global,
             const std::vector<int64_t>& start) {
  Runs runs{};
  runs.count = 1;
  runs.length = 1;
  Index stride = 1;
  bool contiguous = true;  // whether the dims so far make one run
  for (size_t d = shape.size(); d-- > 0;) {
    runs.first += start[d] * stride;
    if (contiguous) {
      runs.length *= shape[d];
      contiguous = shape[d] == global[d];
    } else if (shape[d] != 1) {
      runs.count *= shape[d];
      if (runs.dims == kMaxDims) {
        throw std::invalid_argument("shape " + to_text(shape) + " has more than " +
                                    std::to_string(kMaxDims) + " dims before the last that is sharded");
      }
      runs.sizes[runs.dims] = shape[d];
      runs.strides[runs.dims] = stride;
      ++runs.dims;
    }
    stride *= global[d];
  }
  runs.blocks = (runs.length + 3) / 4 + 1;
  return runs;
}

}  // namespace

void Philox::device(const Io& io, const Operands& o) const {
  if (o.count == 0) return;
  Runs runs = runs_of(o.shape, o.global, o.start);
  runs.state = philox_state(o.key);
  runs.normal = distribution_ == Distribution::kNormal;
  Queue queue(io, "philox.cu", DType::kFloat32);
  queue.launch("philox_fill", over(static_cast<size_t>(runs.count * runs.blocks)), o.out, runs);
}

}  // namespace onnxpar
