"""Gradients, in one operator, of what exporters write in several.

Each is the gradient of the last of the nodes, and recognises the others. It gives the cotangents of
what the first nodes read (`Through`), so the nodes between are not differentiated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.pipeline_places import virtual_stage_of
from onnxpar.ops.attention.rotary_halves import MOST_DIMS, ROTARY_GRAD
from onnxpar.ops.function import Function
from onnxpar.ops.fused.activation_gradients import (
    GATED_GELU_GRAD,
    GATED_GELU_TANH_GRAD,
    GATED_SILU_GRAD,
    SILU_GRAD,
)
from onnxpar.ops.fused.backward import RMS_NORMALIZATION_GRAD
from onnxpar.ops.grad_node import GradNode, Through

Found = Sequence[ir.Value | Through | None] | None


# -- nodes before the last -----------------------------------------------------------------------


def _maker(node: GradNode, value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes a value, if it is of this operator and beside `node`."""
    maker = None if value is None else value.producer()
    if maker is None or (maker.op_type, maker.domain) != (op_type, ""):
        return None
    last = node.view.node
    beside = maker.graph is last.graph and virtual_stage_of(maker) == virtual_stage_of(last)
    return maker if beside else None


def _operands(node: GradNode, value: ir.Value | None, op_type: str) -> tuple[ir.Value, ...]:
    """The operands of such a node; none if there is no such node."""
    maker = _maker(node, value, op_type)
    return () if maker is None else tuple(v for v in maker.inputs if v is not None)


def _either_way(values: Sequence[ir.Value]) -> Sequence[tuple[ir.Value, ir.Value]]:
    """Both orders of two values; none if there are not two."""
    return [(values[0], values[1]), (values[1], values[0])] if len(values) == 2 else []


def _number(value: ir.Value | None) -> float | None:
    """The number that a constant of one element is."""
    tensor = None if value is None else value.const_value
    if tensor is None or tensor.size != 1:
        return None
    return float(np.asarray(tensor.numpy()).reshape(()))


def _integers(value: ir.Value | None) -> list[int] | None:
    """The elements of a constant of integers."""
    tensor = None if value is None else value.const_value
    if tensor is None or tensor.size > 8:
        return None
    return [int(n) for n in np.asarray(tensor.numpy()).reshape(-1)]


# -- activations ---------------------------------------------------------------------------------


def silu_gradient(node: GradNode) -> Found:
    """Of a product x · sigmoid(αx), as exporters write SiLU and CLIP's Gelu."""
    for x, other in _either_way((node.input(0), node.input(1))):
        steep = _in_sigmoid(node, other, x)
        if steep is not None:
            dx = node.fused(SILU_GRAD, node.cotangent(), steep)
            return [dx if value is x and node.wants(i) else None for i, value in _inputs(node)]
    return None


def _inputs(node: GradNode) -> Sequence[tuple[int, ir.Value]]:
    return [(i, node.input(i)) for i in range(node.arity)]


def _in_sigmoid(node: GradNode, value: ir.Value, x: ir.Value) -> ir.Value | None:
    """The operand of the Sigmoid that makes a value, if it is x, or x times what does not vary."""
    steep = _operands(node, value, "Sigmoid")
    if len(steep) != 1 or steep[0] is x:
        return steep[0] if steep else None
    factors = _operands(node, steep[0], "Mul")
    others = [factor for factor in factors if factor is not x]
    if len(factors) != 2 or len(others) != 1 or others[0] in node.varying:
        return None
    return steep[0] if node.shape(steep[0]) == node.shape(x) else None


def gated_gradient(node: GradNode) -> Found:
    """Of a product act(gate) · up, where act is SiLU or Gelu (Shazeer, 2020)."""
    shape = node.shape(node.output())
    for active, up in _either_way((node.input(0), node.input(1))):
        if active is up or active not in node.varying or up not in node.varying:
            continue
        function, gate = _activation(node, active)
        alike = all(node.shape(value) == shape for value in (active, up))
        if function is None or gate is None or not alike:
            continue
        kind = (gate.dtype, shape)
        dgate, dup = node.builder.ops(
            function.name, [node.cotangent(), gate, up], [kind, kind], domain=DOMAIN
        )
        return [Through(gate, dgate) if v is active else dup for _, v in _inputs(node)]
    return None


def _activation(node: GradNode, value: ir.Value) -> tuple[Function | None, ir.Value | None]:
    """The gradient for a gate of which a value is the activation, and the gate."""
    gelu = _maker(node, value, "Gelu")
    if gelu is not None:
        tanh = gelu.attributes.get_string("approximate", "none") == "tanh"
        return GATED_GELU_TANH_GRAD if tanh else GATED_GELU_GRAD, gelu.inputs[0]
    for x, other in _either_way(_operands(node, value, "Mul")):
        if _in_sigmoid(node, other, x) is x:
            return GATED_SILU_GRAD, x
    return None, None


# -- RMS normalisation ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Normal:
    """A product x · inverse, where inverse is 1 / sqrt(mean(x²) + epsilon) over the last dim."""

    x: ir.Value
    inverse: ir.Value


def rms_norm_gradient(node: GradNode) -> Found:
    """Of a product scale · x / sqrt(mean(x²) + epsilon) (Zhang and Sennrich, 2019).

    The second factor may be cast to the type of the product.
    """
    for scale, value in _either_way((node.input(0), node.input(1))):
        cast = _operands(node, value, "Cast")
        normal = _normal(node, cast[0] if cast else value)
        if normal is None or scale.dtype is None:
            continue
        x = normal.x
        *_, width = shape = node.shape(x)
        if x not in node.varying or tuple(node.shape(scale)) != (width,) or len(shape) < 2:
            continue
        build = node.builder
        dy, factor = (build.cast(v, x.dtype) for v in (node.cotangent(), scale))
        made = build.ops(
            RMS_NORMALIZATION_GRAD.name,
            [dy, x, factor, normal.inverse],
            [(x.dtype, shape), (x.dtype, [width])],
            {"axis": -1},
            domain=DOMAIN,
        )
        dscale = None
        if scale in node.varying:
            dscale = build.cast(made[1], scale.dtype)
        else:
            build.forget(made[1])
        through = Through(x, made[0])
        return [dscale if v is scale else through for _, v in _inputs(node)]
    return None


def _normal(node: GradNode, value: ir.Value) -> _Normal | None:
    """What a value is a normalisation of, if it is one."""
    for x, inverse in _either_way(_operands(node, value, "Mul")):
        root = _operands(node, inverse, "Reciprocal")
        if not root:
            quotient = _operands(node, inverse, "Div")
            root = quotient[1:] if quotient and _number(quotient[0]) == 1.0 else ()
        if root and _is_root_mean_square(node, root[0], x):
            return _Normal(x, inverse)
    return None


def _is_root_mean_square(node: GradNode, root: ir.Value, x: ir.Value) -> bool:
    """Whether a value is sqrt(mean(x²) + epsilon) over the last dim, which stays as 1."""
    inside = _operands(node, root, "Sqrt")
    for mean, epsilon in _either_way(_operands(node, inside[0], "Add") if inside else ()):
        reduced = _maker(node, mean, "ReduceMean")
        if _number(epsilon) is None or reduced is None or len(reduced.inputs) < 2:
            continue
        axes = _integers(reduced.inputs[1])
        kept = reduced.attributes.get_int("keepdims", 1) == 1
        if kept and axes in ([-1], [len(node.shape(x)) - 1]):
            return _is_square(node, reduced.inputs[0], x)
    return False


def _is_square(node: GradNode, value: ir.Value | None, x: ir.Value) -> bool:
    power = _operands(node, value, "Pow")
    if power:
        return power[0] is x and _number(power[1]) == 2.0
    factors = _operands(node, value, "Mul")
    return len(factors) == 2 and all(factor is x for factor in factors)


# -- rotary positions ----------------------------------------------------------------------------


def rotary_gradient(node: GradNode) -> Found:
    """Of a sum x · cos + turned(x) · sin, as transformers writes rotary positions.

    The halves of a row of x are a and b, and those of turned(x) are -b and a.
    """
    if node.arity != 2:
        return None
    shape = node.shape(node.output())
    for along, across in _either_way((node.input(0), node.input(1))):
        for turned, sin in _either_way(_operands(node, across, "Mul")):
            x = _turned(node, turned)
            factors = _operands(node, along, "Mul")
            cos = next((b for a, b in _either_way(factors) if a is x), None)
            if x is None or cos is None or node.shape(x) != shape or len(shape) > MOST_DIMS:
                continue
            angles = node.shape(cos)
            fits = angles == node.shape(sin) and angles[-1:] == shape[-1:]
            if fits and not {cos, sin} & set(node.varying):
                dx = node.fused(ROTARY_GRAD, node.cotangent(), cos, sin)
                return [Through(x, dx) if v is along else None for _, v in _inputs(node)]
    return None


def _turned(node: GradNode, value: ir.Value) -> ir.Value | None:
    """The value of whose rows (a, b) a value has (-b, a)."""
    joined = _maker(node, value, "Concat")
    if joined is None or len(joined.inputs) != 2:
        return None
    rank = len(node.shape(value))
    negative = _operands(node, joined.inputs[0], "Neg")
    if not negative or joined.attributes.get_int("axis", 0) not in (-1, rank - 1):
        return None
    second, first = _half(node, negative[0]), _half(node, joined.inputs[1])
    if second is None or first is None or (second[1], first[1]) != (1, 0):
        return None
    return first[0] if first[0] is second[0] else None


def _half(node: GradNode, value: ir.Value | None) -> tuple[ir.Value, int] | None:
    """The value that a value is a half of along the last dim, and which half it is."""
    maker = _maker(node, value, "Split")
    if maker is not None and value is not None:
        whole = maker.inputs[0]
        if whole is None or len(maker.outputs) != 2:
            return None
        rank, width = len(node.shape(whole)), node.shape(whole)[-1]
        if maker.attributes.get_int("axis", 0) not in (-1, rank - 1):
            return None
        return (whole, value.index() or 0) if 2 * node.shape(value)[-1] == width else None
    operands = _operands(node, value, "Slice")
    if len(operands) < 4 or value is None:
        return None
    whole, starts, _, axes = operands[:4]
    rank, width = len(node.shape(whole)), node.shape(whole)[-1]
    half = node.shape(value)[-1]
    if not isinstance(half, int) or 2 * half != width:
        return None
    if _integers(axes) not in ([-1], [rank - 1]):
        return None
    if len(operands) > 4 and _integers(operands[4]) != [1]:
        return None
    start = _integers(starts)
    places = {0: 0, half: 1, -half: 1, -width: 0}
    return (whole, places[start[0]]) if start and start[0] in places else None
