// Batch normalisation in training: sums over channels, and the gradient of the operand.
#include "kernels/channels.h"

#include "kernels/fused.h"

namespace onnxpar {
namespace {

Channels channels_of(const Tensor& x) {
  if (x.shape.size() < 2) {
    throw std::invalid_argument("x has shape " + to_text(x.shape) + ", expected at least 2 dims");
  }
  return {static_cast<size_t>(x.shape[0]), static_cast<size_t>(x.shape[1]),
          product(x.shape, 2, x.shape.size())};
}

void expect_each(const Tensor& vector, const char* name, const Tensor& x, const Channels& of) {
  expect_type(vector, name, x.type);
  expect_count(vector, name, of.channels, "one for each channel");
}

}  // namespace

ChannelSums::Operands ChannelSums::read(const Io& io) const {
  const size_t at = squares_ ? 0 : 1;
  Operands o{io.input(0), io.input(at), io.input(at + 1), {}, {}};
  expect_like(o.dy, "dy", o.x, "x");
  expect_float(o.x, "x");
  o.of = channels_of(o.x);
  expect_each(o.mean, "mean", o.x, o.of);
  for (size_t i = 0; i <= at; ++i) o.sums[i] = output_like(io, i, o.mean);
  return o;
}

BatchNormInputGrad::Operands BatchNormInputGrad::read(const Io& io) const {
  Operands o{io.input(0), io.input(1), {}, io.input(2 + kVectors), {}, {}};
  expect_like(o.dy, "dy", o.x, "x");
  expect_float(o.x, "x");
  o.of = channels_of(o.x);
  constexpr const char* kNames[kVectors] = {"scale", "mean", "inv_std", "total", "slope"};
  for (size_t i = 0; i < kVectors; ++i) {
    o.vectors[i] = io.input(2 + i);
    expect_each(o.vectors[i], kNames[i], o.x, o.of);
  }
  expect_type(o.count, "count", o.x.type);
  expect_one(o.count, "count");
  o.dx = output_like(io, 0, o.x);
  return o;
}

std::vector<Operator> channel_operators() {
  const OutPort dx = port_like(like<1>);
  const OutPort sums = port_like(like<2>);
  return {{"ChannelSums", {{}, {}, {}}, {sums, sums}, never_in_place, fused<ChannelSums>(false)},
          {"ChannelSquareSum", {{}, {}}, {port_like(like<1>)}, never_in_place,
           fused<ChannelSums>(true)},
          {"BatchNormalizationInputGrad", {{}, {}, {}, {}, {}, {}, {}, {}}, {dx}, in_place<0>,
           fused<BatchNormInputGrad>()}};
}

}  // namespace onnxpar
