"""Gradients, in one operator, of what exporters write in several.

Each is the gradient of the last of the nodes. It gives the cotangent of what the first nodes read
(`Through`), so the nodes between are not differentiated.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.pipeline_places import virtual_stage_of
from onnxpar.ops.fused.activation_gradients import GATED, SILU_GRAD
from onnxpar.ops.fused.backward import RMS_NORMALIZATION_GRAD
from onnxpar.ops.fused.rotary import MOST_DIMS, ROTARY_GRAD
from onnxpar.ops.fused.written import (
    Written,
    either_way,
    find_gate,
    find_normal,
    find_rotation,
    find_sigmoid,
)
from onnxpar.ops.grad_node import GradNode, Through

Found = Sequence[ir.Value | Through | None] | None


def _before(node: GradNode) -> Written:
    """The nodes beside this one: in the same graph and the same stage of a pipeline."""
    last = node.view.node

    def maker(value: ir.Value | None) -> ir.Node | None:
        made = None if value is None else value.producer()
        if made is None or made.graph is not last.graph:
            return None
        return made if virtual_stage_of(made) == virtual_stage_of(last) else None

    return Written(maker, node.shape, node.varying)


def _operands(node: GradNode) -> tuple[ir.Value, ...]:
    return tuple(node.input(i) for i in range(node.arity))


def silu_gradient(node: GradNode) -> Found:
    """Of a product x · sigmoid(αx), as exporters write SiLU and CLIP's Gelu."""
    for x, other in either_way(_operands(node)):
        steep = find_sigmoid(_before(node), other)
        if steep is not None and (steep is x or _is_multiple(node, steep, x)):
            dx = node.fused(SILU_GRAD, node.cotangent(), steep)
            return [dx if value is x else None for value in _operands(node)]
    return None


def _is_multiple(node: GradNode, value: ir.Value, x: ir.Value) -> bool:
    """Whether a value is x times what does not vary."""
    factors = _before(node).operands(value, "Mul")
    others = [factor for factor in factors if factor is not x]
    if len(factors) != 2 or len(others) != 1 or others[0] in node.varying:
        return False
    return node.shape(value) == node.shape(x)


def gated_gradient(node: GradNode) -> Found:
    """Of a product act(gate) · up, where act is SiLU or Gelu (Shazeer, 2020)."""
    found = find_gate(_before(node), _operands(node))
    if found is None or found.x not in node.varying or found.up not in node.varying:
        return None
    kind = (found.x.dtype, node.shape(found.x))
    operands = [node.cotangent(), found.x, found.up]
    name = GATED[found.function].name
    dgate, dup = node.builder.ops(name, operands, [kind, kind], domain=DOMAIN)
    return [dup if v is found.up else Through(found.x, dgate) for v in _operands(node)]


def rms_norm_gradient(node: GradNode) -> Found:
    """Of a product scale · x / sqrt(mean(x²) + epsilon) (Zhang and Sennrich, 2019).

    The second factor may be cast to the type of the product.
    """
    graph, build = _before(node), node.builder
    for scale, value in either_way(_operands(node)):
        cast = graph.operands(value, "Cast")
        normal = find_normal(graph, cast[0] if cast else value)
        if normal is None or normal.x not in node.varying:
            continue
        x, shape = normal.x, node.shape(normal.x)
        if len(shape) < 2 or tuple(node.shape(scale)) != tuple(shape[-1:]):
            continue
        dy, factor = (build.cast(v, x.dtype) for v in (node.cotangent(), scale))
        dx, dscale = build.ops(
            RMS_NORMALIZATION_GRAD.name,
            [dy, x, factor, normal.inverse],
            [(x.dtype, shape), (x.dtype, shape[-1:])],
            {"axis": -1},
            domain=DOMAIN,
        )
        found: ir.Value | None = None
        if scale in node.varying:
            found = build.cast(dscale, scale.dtype)
        else:
            build.forget(dscale)
        return [found if v is scale else Through(x, dx) for v in _operands(node)]
    return None


def rotary_gradient(node: GradNode) -> Found:
    """Of a sum x · cos + turned(x) · sin (Su et al., 2021), whose angles do not vary."""
    found = find_rotation(_before(node), _operands(node))
    if found is None or len(node.shape(found.x)) > MOST_DIMS:
        return None
    if found.cos in node.varying or found.sin in node.varying:
        return None
    dx = node.fused(ROTARY_GRAD, node.cotangent(), found.cos, found.sin)
    return [Through(found.x, dx) if v is found.along else None for v in _operands(node)]
