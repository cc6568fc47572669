"""Gradients of the cross-entropy losses, from the log-probabilities of the forward pass."""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.ops.grad_node import GradNode

LOSS_GRAD = "CrossEntropyGrad"
"""Operator of the undivided program: log-probabilities, labels, weights, cotangent -> d scores.

Its attributes `reduction` and `ignore_index` are those of the loss. `softmax` is 1 if operand 0 of
the loss holds scores, and 0 if it holds log-probabilities.
"""


def softmax_cross_entropy_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """D scores = (softmax(scores) - onehot(label)) · weight · cotangent / total weight."""
    scores = node.input(0)
    assert scores.dtype is not None
    log_prob = node.further_output(1, scores.dtype, node.shape(scores))
    result: ir.Value | None = None
    if node.cotangents[0] is not None:
        result = _grad(node, log_prob, softmax=1)
    if len(node.cotangents) > 1 and node.cotangents[1] is not None:
        # The log-probabilities have a cotangent c too: d = c - softmax · Σ c.
        given = node.cotangent(1)
        total = node.builder.reduce("ReduceSum", given, [1], keepdims=True)
        shape = node.shape(scores)
        back = node.op("Mul", node.op("Exp", log_prob), total, shape=shape)
        back = node.op("Sub", given, back)
        result = back if result is None else node.op("Add", result, back)
    return [result]


def log_likelihood_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """D log-probabilities = -onehot(label) · weight · cotangent / total weight."""
    return [_grad(node, node.input(0), softmax=0)]


def _grad(node: GradNode, log_prob: ir.Value, softmax: int) -> ir.Value:
    attributes: dict[str, Any] = {"reduction": node.attr("reduction", "mean")}
    ignored = node.attr("ignore_index")
    if ignored is not None:
        attributes["ignore_index"] = ignored
    return node.op(
        LOSS_GRAD,
        log_prob,
        node.input(1),
        node.input(2) if node.has(2) else None,
        node.cotangent(0),
        shape=node.shape(log_prob),
        domain=DOMAIN,
        softmax=softmax,
        **attributes,
    )
