// Attention without a matrix of all scores, and its gradient.
#include "kernels/attention.h"

#include "kernels/fused.h"

namespace onnxpar {
namespace {

Shape leading(const Shape& shape) {
  return {shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(shape.size()) - 2};
}

// Throws std::invalid_argument.
void broadcast(Shape* lead, const Shape& other, const char* name) {
  if (other.size() > lead->size()) lead->insert(lead->begin(), other.size() - lead->size(), 1);
  const size_t skip = lead->size() - other.size();
  for (size_t i = 0; i < other.size(); ++i) {
    int64_t& dim = (*lead)[skip + i];
    if (dim == 1) dim = other[i];
    else if (other[i] != 1 && other[i] != dim) {
      throw std::invalid_argument(std::string(name) + " has leading dims " + to_text(other) +
                                  ", expected dims that broadcast against " + to_text(*lead));
    }
  }
}

// Where each of the matrices begins: that of `lead`'s i-th element at the i-th number.
std::vector<size_t> beginnings(const Shape& lead, const Shape& own, size_t matrix) {
  std::vector<size_t> begin(product(lead), 0);
  size_t step = matrix;
  size_t inner = 1;
  for (size_t i = 0; i < lead.size(); ++i) {
    const size_t at = lead.size() - 1 - i;
    const size_t size = static_cast<size_t>(lead[at]);
    if (i < own.size()) {
      const size_t mine = static_cast<size_t>(own[own.size() - 1 - i]);
      if (mine != 1) {
        for (size_t h = 0; h < begin.size(); ++h) begin[h] += h / inner % size * step;
      }
      step *= mine;
    }
    inner *= size;
  }
  return begin;
}

Inferred result(const ShapeQuery& query) {
  SymbolicTensor x = query.input(0);
  const SymbolicTensor v = query.input(2);
  // Leading dims may broadcast, which is known only if keys and values have as many.
  if (x.shape.size() < 2 || v.shape.size() != x.shape.size()) return std::nullopt;
  for (size_t i = 0; i + 2 < x.shape.size(); ++i) {
    if (x.shape[i] != v.shape[i] || x.names[i] != v.names[i]) return std::nullopt;
    if (x.shape[i] < 0 && x.names[i].empty()) return std::nullopt;
  }
  x.shape.back() = v.shape.back();
  x.names.back() = v.names.back();
  return x;
}

Shape with_lead(const Attention::Operands& o, size_t rows, size_t columns) {
  Shape shape = o.lead;
  shape.push_back(static_cast<int64_t>(rows));
  shape.push_back(static_cast<int64_t>(columns));
  return shape;
}

}  // namespace

Attention::Attention(const Node& node, Form form)
    : scale_(node.attributes.real("scale").value_or(1)),
      hidden_(node.attributes.real("hidden").value_or(0)),
      form_(form) {}

Attention::Operands Attention::inputs(const Io& io, size_t first) const {
  Operands o{};
  const bool masked = form_ == Form::kMasked;
  const char* const names[] = {"q", "kt", "v", masked ? "seen" : "bias"};
  Matrices* const operands[] = {&o.q, &o.kt, &o.v, &o.mask};
  for (size_t i = 0; i < 4; ++i) {
    operands[i]->tensor = io.input(first + i);
    Tensor& tensor = operands[i]->tensor;
    expect_type(tensor, names[i], i == 3 && masked ? DType::kBool : o.q.tensor.type);
    if (i == 3 && tensor.shape.size() < 2) {
      tensor.shape.insert(tensor.shape.begin(), 2 - tensor.shape.size(), 1);
    }
    if (tensor.shape.size() < 2) {
      throw std::invalid_argument(std::string(names[i]) + " has shape " + to_text(tensor.shape) +
                                  ", expected at least 2 dims");
    }
    broadcast(&o.lead, leading(tensor.shape), names[i]);
  }
  expect_float(o.q.tensor, "q");
  const auto size = [](const Matrices& of, size_t back) {
    const Shape& shape = of.tensor.shape;
    return static_cast<size_t>(shape[shape.size() - back]);
  };
  o.s = size(o.q, 2);
  o.d = size(o.q, 1);
  o.t = size(o.kt, 1);
  o.e = size(o.v, 1);
  const auto expect = [](const char* name, size_t found, size_t wanted, const char* what) {
    if (found == wanted) return;
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(found) + " " + what +
                                ", expected " + std::to_string(wanted));
  };
  expect("kt", size(o.kt, 2), o.d, "rows");
  expect("v", size(o.v, 2), o.t, "rows");
  if (size(o.mask, 2) != 1) expect(names[3], size(o.mask, 2), o.s, "rows");
  if (size(o.mask, 1) != 1) expect(names[3], size(o.mask, 1), o.t, "columns");
  o.mask_row = size(o.mask, 2) == 1 ? 0 : size(o.mask, 1);
  o.mask_column = size(o.mask, 1) == 1 ? 0 : 1;
  for (Matrices* of : operands) {
    of->begin = beginnings(o.lead, leading(of->tensor.shape), size(*of, 2) * size(*of, 1));
  }
  o.heads = product(o.lead);
  return o;
}

Attention::Operands Attention::read(const Io& io) const {
  Operands o = inputs(io, 0);
  o.y = output(io, 0, with_lead(o, o.s, o.e), o.q.tensor.type);
  return o;
}

AttentionGrad::Operands AttentionGrad::read(const Io& io) const {
  Operands o = inputs(io, 1);
  const DType type = o.q.tensor.type;
  o.dq = output(io, 0, with_lead(o, o.s, o.d), type);
  o.dkt = output(io, 1, with_lead(o, o.d, o.t), type);
  o.dv = output(io, 2, with_lead(o, o.t, o.e), type);
  o.dy = io.input(0);
  expect_type(o.dy, "dy", type);
  const Shape shape = with_lead(o, o.s, o.e);
  if (o.dy.shape != shape) {
    throw std::invalid_argument("dy has shape " + to_text(o.dy.shape) + ", expected " +
                                to_text(shape));
  }
  return o;
}

std::vector<Operator> attention_operators() {
  using Form = Attention::Form;
  const auto mask = [](Form form) { return InPort{form == Form::kMasked ? kBool : kAny}; };
  const auto forward = [&](const char* name, Form form) {
    return Operator{name, {{}, {}, {}, mask(form)}, {port_like(result)}, never_in_place,
                    fused<Attention>(form)};
  };
  const auto backward = [&](const char* name, Form form) {
    const OutPort any{kAny, ort::kOptional};
    return Operator{name, {{}, {}, {}, {}, mask(form)}, {any, any, any}, never_in_place,
                    fused<AttentionGrad>(form)};
  };
  std::vector<Operator> all = {
      forward("ScaledDotProductAttention", Form::kBiased),
      forward("SafeScaledDotProductAttention", Form::kSafe),
      forward("MaskedScaledDotProductAttention", Form::kMasked),
      backward("ScaledDotProductAttentionGrad", Form::kBiased),
      backward("SafeScaledDotProductAttentionGrad", Form::kSafe),
      backward("MaskedScaledDotProductAttentionGrad", Form::kMasked),
  };
  for (Operator& of : all) of.needs_no_gpu = true;
  return all;
}

}  // namespace onnxpar
