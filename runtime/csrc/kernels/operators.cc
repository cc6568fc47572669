#include "kernels/operators.h"

#include "kernels/fused.h"

namespace onnxpar {

const std::vector<Operator>& fused_operators() {
  static const std::vector<Operator> all = [] {
    std::vector<Operator> made;
    for (auto* family : {accumulate_operators, attention_operators, channel_operators,
                         filter_operators, gather_operators, loss_operators, philox_operators,
                         pointwise_operators, rotary_operators, row_operators, standard_operators,
                         step_operators}) {
      for (Operator& of : family()) made.push_back(std::move(of));
    }
    return made;
  }();
  return all;
}

}  // namespace onnxpar
