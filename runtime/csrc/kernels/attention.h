#pragma once

#include <vector>

#include "abi/operator.h"
#include "kernels/io.h"

namespace onnxpar {

// Attention whose scores exist for a few queries at a time; see kernels/operators.h.
class Attention {
 public:
  // What the fourth operand is: added to the scores, or says which of them count. In the safe form
  // a row of shares that are no numbers counts as zeros.
  enum class Form { kBiased, kSafe, kMasked };
  // Where each product of matrices begins in an operand whose leading dims broadcast.
  struct Matrices {
    Tensor tensor;
    std::vector<size_t> begin;
  };
  struct Operands {
    Matrices q, kt, v, mask;
    Shape lead;
    size_t heads;   // products of matrices: the number of elements of `lead`
    size_t s, t;    // queries and keys
    size_t d, e;    // elements of a query and of a value
    size_t mask_row, mask_column;  // steps between its elements, 0 where it broadcasts
    Output y;
    Tensor dy;  // of the gradient, as are the next
    Output dq, dkt, dv;
  };
  Attention(const Node& node, Form form);
  Operands read(const Io& io) const;
  void host(const Io& io, const Operands& o) const;
  // It is registered for hosts alone.
  void device(const Io&, const Operands&) const {}

 protected:
  Operands inputs(const Io& io, size_t first) const;
  const double scale_;
  const double hidden_;  // the score of what a mask hides
  const Form form_;
};

class AttentionGrad : public Attention {
 public:
  using Attention::Attention;
  Operands read(const Io& io) const;
  void host(const Io& io, const Operands& o) const;
};

}  // namespace onnxpar
