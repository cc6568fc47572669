// Operators that compute, most of them fused for training, as operators of the domain `onnxpar`, version 1, for onnxruntime's CPU
// and CUDA providers.
//
// Graphs carry each of these operators together with a model-local function of the same name that
// says the same in standard operators. onnxruntime takes the kernel where one is registered and
// expands the function where none is, as on other providers. Those that stand for a standard operator
// are registered only where there is a GPU: of an operator that is registered onnxruntime expands no
// function, for want of a kernel either.
//
// T is float32, float64, float16 or bfloat16, the last two computed in float32; in a node all T are
// the same. The ports take any type, since one that is not registered would not go to the function
// but be refused when the graph is loaded. D is float64, with one element. Shapes are equal unless
// stated; `?` may be left out. Outputs named like an input with a prime may take that input's memory,
// and so may dx that of dy. Sums are taken in pieces of fixed size, so that results do not depend
// on the thread count.
//
//   ReluGrad(dy T, y T) -> dx T                                      y > 0 ? dy : 0
//   TanhGrad(dy T, y T) -> dx T                                      dy (1 - y^2)
//   SigmoidGrad(dy T, y T) -> dx T                                   dy y (1 - y)
//   GeluGrad(dy T, x T) -> dx T
//   GeluTanhGrad(dy T, x T) -> dx T                                  of Gelu's form with tanh
//   SiluGrad(dy T, x T) -> dx T                                      of x sigmoid(x)
//   GatedGelu(gate T, up T) -> y T                                   Gelu(gate) up; y may take gate's
//   GatedGeluTanh, GatedSilu: the same for the other two             memory
//   GatedGeluGrad(dy T, gate T, up T) -> (dgate T, dup T)            of Gelu(gate) up
//   GatedGeluTanhGrad, GatedSiluGrad: the same for the other two
//     dgate may take the memory of dy, dup that of up.
//   SoftmaxGrad(dy T, y T; axis = -1) -> dx T                        y (dy - sum(dy y))
//   LogSoftmaxGrad(dy T, y T; axis = -1) -> dx T                     dy - exp(y) sum(dy)
//   LayerNormalizationGrad(dy T, x T, scale T, mean U, inv_std U; axis = -1)
//       -> (dx T, dscale T?, dbias T?)
//     scale has the shape of x from `axis` on, mean and inv_std one element for each row before it;
//     U is T or float32, as ONNX's stash_type has it.
//   RMSNormalizationGrad(dy T, x T, scale T, inv_std U; axis = -1) -> (dx T, dscale T?)
//     The same without mean and bias.
//   RotaryEmbedding(x T [..., 2 H], cos T [..., 2 H], sin T) -> y T
//     With the halves a and b of a row, (a cos - b sin, b cos + a sin); each element has its own angle.
//     cos broadcasts to x, but for the last dim, and sin has the shape of cos. y may take the memory
//     of x.
//   RotaryEmbeddingGrad(dy T, cos T, sin T) -> dx T
//   ChannelSums(dy T [N, C, ...], x T, mean T [C]) -> (total T [C], along T [C])
//     For each channel the sums of dy and of dy (x - mean).
//   ChannelSquareSum(x T [N, C, ...], mean T [C]) -> sum T [C]      of (x - mean)^2
//   BatchNormalizationInputGrad(dy T [N, C, ...], x T, scale T [C], mean T [C], inv_std T [C],
//                               total T [C], slope T [C], count T [1]) -> dx T
//     total is the sum of dy, slope that of dy (x - mean) inv_std, over count elements:
//     scale inv_std (dy - total / count - (x - mean) inv_std slope / count).
//   TurnedWeights(w T [G M, C, ...]; group = G) -> y T [G C, M, ...]
//     In each group both kinds of channels are exchanged, and all dims behind them reversed.
//   SoftmaxCrossEntropyLoss(scores T [N, C, ...], labels int64 [N, ...], weights T? [C];
//                           reduction = "mean" | "sum" | "none", ignore_index?)
//       -> (loss T [] or that of labels, log_prob T?)
//     As ONNX's; a label that is none of the C classes is an error.
//   SoftmaxCrossEntropyLossGrad(dloss T, log_prob T [N, C, ...], labels int64 [N, ...],
//                               weights T? [C]; reduction = "mean" | "sum" | "none", ignore_index?)
//       -> dx T [N, C, ...]
//     dloss has the shape of labels where reduction is "none", else one element. A mean over no
//     label has gradient 0.
//   GatherGrad(dy T, indices int64, data T; axis = 0) -> dx T with the shape of data
//     Of Gather(data, indices); the elements of data are not read.
//   ScaledDotProductAttention(q T [..., S, D], kt T [..., D, K], v T [..., K, E], bias T;
//                             scale = 1) -> y T [..., S, E]
//     Softmax(scale q kt + bias) v. All dims but the last two broadcast; bias broadcasts against the
//     scores [..., S, K], which exist for a few queries at a time. Keys that no query of a block sees,
//     by a bias of -1e30 or less, are left out, since their shares are 0 for any finite scores.
//   SafeScaledDotProductAttention: the same; a row of shares that are no numbers counts as zeros,
//     as where a bias of -inf hides all keys.
//   MaskedScaledDotProductAttention(q T, kt T, v T, seen bool; scale = 1, hidden): the same, but
//     scores are `hidden` where `seen` is false; nothing is added. Keys are left out if `hidden` is
//     -1e30 or less.
//   ScaledDotProductAttentionGrad(dy T [..., S, E], q T, kt T, v T, bias T; scale = 1)
//       -> (dq T? [..., S, D], dkt T? [..., D, K], dv T? [..., K, E])
//     It computes the scores again. There are a Safe and a Masked form, too. These six are registered
//     only where there is no GPU.
//   SquareSum(x T, ...) -> sum [], float64 where the first x is, else float32
//     The sum of the squares of all elements of all inputs, whose shapes may differ.
//   SgdStep(p T, g T, scale D, lr D, weight_decay D?, active D?) -> p' T
//   MomentumStep(p T, g T, m T, scale D, lr D, momentum D, dampening D, first D,
//                weight_decay D?, active D?)
//       -> (p' T, m' T)                                              first is 1 in the first step
//   AdamStep(p T, g T, m T, v T, scale D, lr_corrected D, beta1 D, beta1_complement D, beta2 D,
//            beta2_complement D, eps D, correction2_sqrt D, weight_decay D?, active D?)
//       -> (p' T, m' T, v' T)
//   AdamWStep: as AdamStep, but with decay D? = 1 - lr weight_decay in place of weight_decay
//     These four follow torch.optim; g is first multiplied by `scale`, the coefficient of clipping.
//     If `active` is 0, nothing changes, whatever g is.
//   Accumulate(token, mode int64, g T..., sum T...) -> token
//     Adds up gradients of micro-batches. Each g is an output of the graph, and each sum an input,
//     both states that live in memory of the runtime. It writes into one of them: g += sum in the
//     last micro-batch (mode 1), sum = g in the first (2), sum += g in between (3); with mode 0,
//     which stands for a single micro-batch, nothing. It has no function in standard operators.
//     Where the runtime makes the gradients values inside the graph, only modes 2 and 3 occur.
//   Philox(key int64, shape int64, global_shape int64, start int64;
//          distribution = "uniform" | "normal", dtype = 1) -> Y float32
//     See kernels/host/philox.h. It is of ranks, and its inputs lie in host memory.
//   Acos, Acosh, Asin, Asinh, Atan, Atanh, Celu, Cosh, Elu, MaxPool, Selu, Sinh, Tan,
//   ThresholdedRelu
//     As ONNX's, on GPUs alone; of MaxPool those of up to three spatial dims and storage_order 0.
#pragma once

#include <vector>

#include "abi/operator.h"

namespace onnxpar {

const std::vector<Operator>& fused_operators();

}  // namespace onnxpar
