#include "kernels/device/philox.h"

#include <stdexcept>

#include "kernels/device/queue.h"

namespace onnxpar::cuda {
namespace {

// As in device/philox.cu.
constexpr size_t kMaxDims = 12;
struct Runs {
  philox::Words state;
  Index count = 1;
  Index length = 1;
  Index blocks = 0;
  Index first = 0;
  int dims = 0;
  bool normal = false;
  Index sizes[kMaxDims] = {};
  Index strides[kMaxDims] = {};
};

// The block as runs of elements that are neighbours in the global array as well; dims that do not
// tell anything are left out.
Runs runs_of(const std::vector<int64_t>& shape, const std::vector<int64_t>& global,
             const std::vector<int64_t>& start) {
  Runs runs;
  Index stride = 1;
  bool whole = true;  // whether the dims so far make one run
  for (size_t d = shape.size(); d-- > 0;) {
    runs.first += start[d] * stride;
    if (whole) {
      runs.length *= shape[d];
      whole = shape[d] == global[d];
    } else if (shape[d] != 1) {
      runs.count *= shape[d];
      if (runs.dims == static_cast<int>(kMaxDims)) {
        throw std::invalid_argument("shape " + to_text(shape) + " has more than " +
                                    std::to_string(kMaxDims) + " dims before those that are whole");
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

void philox(const Io& io, Distribution distribution) {
  const std::vector<int64_t> key = io.input(0).integers();
  const std::vector<int64_t> shape = io.input(1).integers();
  const std::vector<int64_t> global = io.input(2).integers();
  const std::vector<int64_t> start = io.input(3).integers();
  if (philox_count(key, shape, global, start) == 0) {
    io.output(0, shape);
    return;
  }
  Runs runs = runs_of(shape, global, start);
  runs.state = philox_state(key);
  runs.normal = distribution == Distribution::kNormal;
  Queue queue(io, "philox.cu", DType::kFloat32);
  queue.launch("philox_fill", over(static_cast<size_t>(runs.count * runs.blocks)),
               io.output(0, shape), runs);
}

}  // namespace onnxpar::cuda
