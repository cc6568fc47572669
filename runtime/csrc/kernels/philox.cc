#include "kernels/philox.h"

#include "kernels/fused.h"

namespace onnxpar {

Philox::Philox(const Node& node) {
  const std::string name = node.attributes.text("distribution").value_or("uniform");
  if (name != "uniform" && name != "normal") {
    throw std::invalid_argument("distribution is '" + name + "', expected uniform or normal");
  }
  const int64_t type = node.attributes.integer("dtype").value_or(kFloat);
  if (type != kFloat) {
    throw std::invalid_argument("dtype is " + std::to_string(type) +
                                ", expected 1 (float32); cast the result for others");
  }
  if (name == "normal") distribution_ = Distribution::kNormal;
}

Philox::Operands Philox::read(const Io& io) const {
  Operands o{io.input(0).integers(), io.input(1).integers(), io.input(2).integers(),
             io.input(3).integers(), 0, nullptr};
  o.count = philox_count(o.key, o.shape, o.global, o.start);
  o.out = static_cast<float*>(io.output(0, o.shape));
  return o;
}

void Philox::host(const Io&, const Operands& o) const {
  philox_fill(o.out, o.key, o.shape, o.global, o.start, distribution_);
}

std::vector<Operator> philox_operators() {
  const InPort numbers{kInt64, ort::kRequired, true};
  Operator of{"Philox", {numbers, numbers, numbers, numbers}, {{kFloat}}, never_in_place,
              fused<Philox>()};
  of.of_rank = true;
  return {of};
}

}  // namespace onnxpar
