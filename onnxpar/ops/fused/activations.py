"""Activations and products that onnxruntime's optimiser fuses (domain `com.microsoft`)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from onnxpar.core.rule import OpRule
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.contraction.matmul import gemm_rule, on_first
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.elementwise.broadcast import broadcast_rule
from onnxpar.ops.fused.inference import infer_fused_gemm
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import BY_BODY, OpDef


def _gelu_body(*, approximate: str) -> Callable[[BodyNode], Sequence[ir.Value]]:
    def body(node: BodyNode) -> Sequence[ir.Value]:
        x = node.input(0)
        if node.has(1):
            x = node.op("Add", x, node.input(1), shape=node.view.out_shape())
        return (node.op("Gelu", x, approximate=approximate),)

    body.__doc__ = "The sum with the bias, if any, and its Gelu (Hendrycks and Gimpel, 2016)."
    return body


def quick_gelu_body(node: BodyNode) -> Sequence[ir.Value]:
    """Gives x times the sigmoid of alpha times x."""
    x = node.input(0)
    steep = node.op("Mul", x, node.number(float(node.attr("alpha", 1.702)), x))
    return (node.op("Mul", x, node.op("Sigmoid", steep)),)


# For each activation: its attributes in ONNX, those of FusedGemm, and onnxruntime's defaults.
_ACTIVATIONS = {
    "Relu": (),
    "Tanh": (),
    "Sigmoid": (),
    "LeakyRelu": (("alpha", "activation_alpha", 0.01),),
    "HardSigmoid": (("alpha", "activation_alpha", 0.2), ("beta", "activation_beta", 0.5)),
    "ThresholdedRelu": (("alpha", "activation_alpha", 1.0),),
    "Elu": (("alpha", "activation_alpha", 1.0),),
}


def _activation(view: NodeView) -> tuple[str, dict[str, Any]]:
    """The operator that follows a product, and its attributes.

    Raises:
        ModelError: The activation is unknown.
    """
    name = str(view.attr("activation", ""))
    if name not in _ACTIVATIONS:
        raise view.fail(f"expected one of the activations {', '.join(_ACTIVATIONS)}, got {name!r}")
    return name, {kind: float(view.attr(key, d)) for kind, key, d in _ACTIVATIONS[name]}


def _product(view: NodeView) -> dict[str, Any]:
    """The attributes of the product."""
    names = ("alpha", "beta", "transA", "transB")
    return {name: view.attr(name) for name in names if view.attr(name) is not None}


def fused_gemm_rule(view: NodeView) -> OpRule:
    """FusedGemm: as Gemm, but K is special: its sum must be complete before the activation."""
    _activation(view)
    rule = gemm_rule(view)
    kinds = {name: "special" if name == "K" else kind for name, kind in rule.kinds.items()}
    return replace(rule, kinds=kinds, linear=())


def fused_gemm_local(node: LocalNode) -> Sequence[ir.Value]:
    """If K is sharded: Gemm, an all-reduce of its partial sums, and the activation."""
    atoms = node.atoms("K")
    if not atoms:
        return node.copy()
    operands = []
    for index in (0, 1):
        operands.append(node.masked(node.input(index), index, "K", 0, known_zero=node.zero[index]))
    if node.has(2):
        operands.append(on_first(node, 2, atoms))
    shape = node.out_shape()
    part = node.op("Gemm", *operands, dtype=node.out_dtype(), shape=shape, **_product(node.view))
    name, given = _activation(node.view)
    return (node.op(name, node.all_reduce(part, atoms), shape=shape, **given),)


def fused_gemm_body(node: BodyNode) -> Sequence[ir.Value]:
    """Gemm and the activation."""
    operands = [node.input(i) for i in range(3) if node.has(i)]
    y = node.op("Gemm", *operands, shape=node.view.out_shape(), **_product(node.view))
    name, given = _activation(node.view)
    return (node.op(name, y, **given),)


def elementwise_rule(view: NodeView) -> OpRule:
    """Every dim; a bias is sharded by the dims that it has."""
    return broadcast_rule(view)


def _elementwise(op_type: str, body: Callable[[BodyNode], Sequence[ir.Value]]) -> OpDef:
    return OpDef(MICROSOFT, op_type, 1, elementwise_rule, gradient=BY_BODY, body=body)


DEFS = (
    _elementwise("Gelu", _gelu_body(approximate="none")),
    _elementwise("BiasGelu", _gelu_body(approximate="none")),
    _elementwise("FastGelu", _gelu_body(approximate="tanh")),
    _elementwise("QuickGelu", quick_gelu_body),
    OpDef(
        MICROSOFT,
        "FusedGemm",
        1,
        fused_gemm_rule,
        fused_gemm_local,
        gradient=BY_BODY,
        body=fused_gemm_body,
        infer=infer_fused_gemm,
    ),
)
