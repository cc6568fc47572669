// Rotary positions (Su et al., 2021), and their gradient.
#include "kernels/rotary.h"

#include "kernels/fused.h"

namespace onnxpar {
namespace {

#define ONNXPAR_RULE(name) {#name, ONNXPAR_CHOICE(name)}
constexpr Rotary::Rule kForward = ONNXPAR_RULE(rotary);
constexpr Rotary::Rule kBackward = ONNXPAR_RULE(rotary_grad);

[[noreturn]] void refuse(const Tensor& cos, const Tensor& x) {
  throw std::invalid_argument("cos has shape " + to_text(cos.shape) +
                              ", expected one that broadcasts to that of x, " + to_text(x.shape));
}

// Where the angles of each row of x lie: dims of x whose angles are as far apart as if they were one
// dim are one.
cuda::AngleRows angle_rows(const Tensor& x, const Tensor& cos) {
  const size_t rank = x.shape.size();
  const size_t missing = rank - cos.shape.size();
  cuda::AngleRows rows{};
  int64_t stride = cos.shape.back();
  for (size_t dim = rank - 1; dim-- > 0;) {
    const int64_t size = x.shape[dim];
    const int64_t angles = dim < missing ? 1 : cos.shape[dim - missing];
    if (angles != 1 && angles != size) refuse(cos, x);
    if (size == 1) continue;
    const int64_t apart = angles == 1 ? 0 : stride;
    stride *= angles;
    const int last = rows.count - 1;
    if (last >= 0 && apart == rows.apart[last] * rows.size[last]) {
      rows.size[last] *= size;
      continue;
    }
    if (rows.count == cuda::kAngleDims) {
      throw std::invalid_argument("cos has shape " + to_text(cos.shape) + ", expected at most " +
                                  std::to_string(cuda::kAngleDims) + " groups of dims");
    }
    rows.size[rows.count] = size;
    rows.apart[rows.count++] = apart;
  }
  return rows;
}

Operator rotation(const char* name, const Rotary::Rule& rule) {
  return {name, {{}, {}, {}}, {port_like(like<0>)}, in_place<0>, fused<Rotary>(rule)};
}

}  // namespace

Rotary::Operands Rotary::read(const Io& io) const {
  const Tensor x = io.input(0);
  const Tensor cos = io.input(1);
  const Tensor sin = io.input(2);
  expect_float(x, "x");
  expect_type(cos, "cos", x.type);
  expect_like(sin, "sin", cos, "cos");
  if (x.shape.empty() || x.shape.back() % 2 != 0) {
    throw std::invalid_argument("x has shape " + to_text(x.shape) +
                                ", expected an even number of elements in the last dim");
  }
  const bool fits = !cos.shape.empty() && cos.shape.size() <= x.shape.size();
  if (!fits || cos.shape.back() != x.shape.back()) refuse(cos, x);
  return {x,
          cos,
          sin,
          output_like(io, 0, x),
          product(x.shape, 0, x.shape.size() - 1),
          static_cast<size_t>(x.shape.back() / 2),
          angle_rows(x, cos)};
}

std::vector<Operator> rotary_operators() {
  return {rotation("RotaryEmbedding", kForward), rotation("RotaryEmbeddingGrad", kBackward)};
}

}  // namespace onnxpar
