"""Finds attention in the form of exporters: product, scale, mask, Softmax and product.

The result is what `onnxpar.ops.attention.fused` computes in one node: the forward part, and the
backward part if there is one. Both are found together, because the shares (the result of the
Softmax) need not be computed if every node that reads them is replaced.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeGuard

import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.metadata_keys import RECOMPUTED_FROM
from onnxpar.ops.attention.fused import BIASED, MASKED, SAFE, Form
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.fused.fused_nodes import FusedNodes, NodeGraph
from onnxpar.ops.fused.written import number_of

LEAST_KEYS = 128
"""A sequence of fewer keys stays as it is: its scores take little memory and time
(docs/design/0039-attention.md)."""
_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True)
class Attention:
    """One attention: Softmax(scale · q·kt + bias)·v, or with a mask in place of the bias.

    Attributes:
        forward: The nodes from the scores to the result, with the operands q, kt, v, and bias or
            mask (None: zero is added); None if nothing reads the result, as where it is recomputed.
        backward: The nodes of the gradient, with dy before these operands, and the results dq, dkt
            and dv; None without a gradient. The masks of the new nodes are true where a score is
            seen.
    """

    forward: FusedNodes | None
    backward: FusedNodes | None

    @property
    def parts(self) -> tuple[FusedNodes, ...]:
        """The parts that there are."""
        return tuple(part for part in (self.forward, self.backward) if part is not None)


def find_attentions(
    graph: NodeGraph, keys: Callable[[ir.Value], int | None]
) -> Iterator[Attention]:
    """Yields each attention that can be replaced.

    Args:
        graph: The graph of a rank.
        keys: Returns the greatest size that the last dim of a value may have; None if that is not
            bounded.
    """
    for node in graph.nodes:
        # In float64, the factor would lose digits as an attribute.
        if _is(node, "Softmax") and _over_last(node) and node.outputs[0].dtype in _TYPES:
            most = keys(node.outputs[0])
            if most is None or most >= LEAST_KEYS:
                found = _attention(node, graph)
                if found is not None:
                    yield found


def _is(node: ir.Node | None, op_type: str, domain: str = "") -> TypeGuard[ir.Node]:
    return node is not None and (node.op_type, node.domain) == (op_type, domain)


def _over_last(softmax: ir.Node) -> bool:
    shape = softmax.outputs[0].shape
    axis = softmax.attributes.get_int("axis", -1)
    return axis == -1 or (shape is not None and axis == len(shape) - 1)


def _is_transposed(node: ir.Node, *, first: bool, second: bool) -> bool:
    """Whether a node is the product of matrices of which the first or the second is transposed."""
    if not _is(node, "FusedMatMul", MICROSOFT) or node.attributes.get_float("alpha", 1.0) != 1.0:
        return False
    flags = [bool(node.attributes.get_int(name, 0)) for name in ("transA", "transB")]
    return flags == [first, second]


@dataclass(frozen=True)
class _Scores:
    """What a Softmax takes: scale · q·kt + bias, or what a mask leaves of scale · q·kt.

    Attributes:
        nodes: The nodes that compute it, in order.
        q: The first operand of the product.
        kt: The second one.
        scaling: The node that scales the product, if there is one.
        scale: The factor.
        mask: What is added, or which scores are left, if there is something.
        hidden: What replaces the others; None if the mask is added.
        inverted: Whether the mask is true for those that are replaced.
    """

    nodes: tuple[ir.Node, ...]
    q: ir.Value
    kt: ir.Value
    scaling: ir.Node | None
    scale: float
    mask: ir.Value | None = None
    hidden: float | None = None
    inverted: bool = False


def _scores(softmax: ir.Node, graph: NodeGraph) -> _Scores | None:
    value = softmax.inputs[0]
    last = graph.maker(value)
    hidden, inverted = None, False
    found: list[tuple[ir.Value | None, ir.Value | None]] = [(value, None)]
    if _is(last, "Add"):
        found = [(last.inputs[0], last.inputs[1]), (last.inputs[1], last.inputs[0])]
    elif _is(last, "Where"):
        inverted = _is_filled(last)
        kept, other = _branches(last, inverted)
        found, hidden = [(kept, last.inputs[0])], number_of(other)
        if hidden is None:
            return None
    for product, mask in found:
        scores = _scaled(product, graph)
        if scores is not None and mask is None:
            return scores
        if scores is not None and last is not None and _shape(product) == _shape(value):
            opposite = graph.maker(mask)
            if inverted and _is(opposite, "Not"):
                mask, inverted = opposite.inputs[0], False
            nodes = (*scores.nodes, last)
            return replace(scores, nodes=nodes, mask=mask, hidden=hidden, inverted=inverted)
    return None


def _is_filled(where: ir.Node) -> bool:
    """Whether a Where takes a number where its test is true, as `masked_fill` is written."""
    return number_of(where.inputs[1]) is not None


def _branches(where: ir.Node, inverted: bool) -> tuple[ir.Value | None, ir.Value | None]:
    """The operand that a Where takes where a score is seen, and the other one."""
    _, true, false = where.inputs
    return (false, true) if inverted else (true, false)


def _scaled(value: ir.Value | None, graph: NodeGraph) -> _Scores | None:
    """The scores that are a product, scaled or not."""
    node = graph.maker(value)
    scaling, scale = None, 1.0
    if _is(node, "Mul") or _is(node, "Div"):
        factor = number_of(node.inputs[1])
        if not factor:
            return None
        scaling, scale = node, factor if node.op_type == "Mul" else 1 / factor
        node = graph.maker(node.inputs[0])
    if not _is(node, "MatMul"):
        return None
    q, kt = node.inputs
    if q is None or kt is None or min(len(_shape(q)), len(_shape(kt))) < 2:
        return None
    return _Scores((node,) if scaling is None else (node, scaling), q, kt, scaling, scale)


def _shape(value: ir.Value | None) -> tuple[object, ...]:
    return () if value is None or value.shape is None else tuple(value.shape)


def _attention(softmax: ir.Node, graph: NodeGraph) -> Attention | None:
    scores, shares = _scores(softmax, graph), softmax.outputs[0]
    if scores is None:
        return None
    before = [*scores.nodes, softmax]
    none: ir.Node | None = None
    for node in graph.readers(shares):
        if _is(node, "IsNaN"):
            none = node
    if none is not None:
        if scores.hidden is not None:
            return None
        choice = next((n for n in graph.readers(shares) if _chooses(n, none, shares)), None)
        if choice is None:
            return None
        before += [none, choice]
    result = before[-1].outputs[0]
    products = [n for n in graph.readers(result) if _is(n, "MatMul") and n.inputs[0] is result]
    slopes = [n for n in graph.readers(shares) if n.op_type == "SoftmaxGrad"]
    if len(products) > 1 or len(slopes) > 1 or not products + slopes:
        return None
    backward = _backward(scores, slopes[0], result, none, graph) if slopes else None
    if slopes and backward is None:
        return None
    if backward is not None and products and backward.inputs[3] is not products[0].inputs[1]:
        return None
    inner = [v for node in before for v in node.outputs]
    replaced = {*before, *products, *(backward.nodes if backward is not None else ())}
    if graph.needs(inner, replaced):
        return None
    forward = None
    if products:
        product = products[0]
        if _shape(product.outputs[0])[:-1] != _shape(result)[:-1]:
            return None
        inputs = (scores.q, scores.kt, product.inputs[1], scores.mask)
        form, attributes = _form(scores, none)
        forward = FusedNodes(
            DOMAIN,
            form.forward.name,
            attributes,
            (*before, product),
            inputs,
            (product.outputs[0],),
            scores.inverted,
        )
    return Attention(forward, backward)


def _form(scores: _Scores, none: ir.Node | None) -> tuple[Form, dict[str, float]]:
    """The form of an attention, and the attributes of its operators."""
    if scores.hidden is not None:
        return MASKED, {"scale": scores.scale, "hidden": scores.hidden}
    return BIASED if none is None else SAFE, {"scale": scores.scale}


def _chooses(node: ir.Node, none: ir.Node, value: ir.Value) -> bool:
    """Whether a node is zero where a value is no number, and the value elsewhere."""
    if not _is(node, "Where") or node.inputs[0] is not none.outputs[0]:
        return False
    return node.inputs[2] is value and number_of(node.inputs[1]) == 0.0


def _backward(
    scores: _Scores, slope: ir.Node, result: ir.Value, none: ir.Node | None, graph: NodeGraph
) -> FusedNodes | None:
    """The gradient of an attention.

    Args:
        scores: Its scores.
        slope: The node with the gradient of the Softmax.
        result: What is multiplied by the values.
        none: The node that says where a share is no number, if there is one.
        graph: The graph.
    """
    nodes = [slope]
    before = graph.maker(slope.inputs[0])
    if none is not None and before is not None:
        value = before.inputs[2] if _is(before, "Where") else None
        if value is None or not _chooses(before, none, value):
            return None
        nodes.append(before)
        before = graph.maker(value)
    if before is None or not _is_transposed(before, first=False, second=True):
        return None
    nodes.append(before)
    dy, v = before.inputs
    inner = [before.outputs[0], nodes[-2].outputs[0], slope.outputs[0]]
    slopes = slope.outputs[0]
    for forward in (scores.nodes[-1] if scores.hidden is not None else None, scores.scaling):
        if forward is None:
            continue
        reading = graph.readers(slopes)
        if len(reading) != 1 or not _is_gradient(reading[0], forward, slopes):
            return None
        after = reading[0]
        nodes.append(after)
        slopes = after.outputs[0]
        inner.append(slopes)
    made: dict[str, ir.Node] = {}
    for node in graph.readers(slopes):
        if _is_transposed(node, first=False, second=True) and node.inputs[1] is scores.kt:
            made["dq"] = node
        elif _is_transposed(node, first=True, second=False) and node.inputs[0] is scores.q:
            made["dkt"] = node
        else:
            return None
    for node in graph.readers(result):
        if _is_transposed(node, first=True, second=False) and node.inputs[1] is dy:
            made["dv"] = node
    nodes += made.values()
    if graph.needs(inner, nodes):
        return None
    outputs = tuple(made[n].outputs[0] if n in made else None for n in ("dq", "dkt", "dv"))
    inputs = (dy, scores.q, scores.kt, v, scores.mask)
    form, attributes = _form(scores, none)
    return FusedNodes(
        DOMAIN, form.backward.name, attributes, tuple(nodes), inputs, outputs, scores.inverted
    )


def _is_same(value: ir.Value | None, original: ir.Value | None) -> bool:
    """Whether a value is another one, or what a recomputed copy of its node makes."""
    if value is None or original is None or value is original:
        return value is original
    copy, node = value.producer(), original.producer()
    if copy is None or node is None or value.index() != original.index():
        return False
    return copy.metadata_props.get(RECOMPUTED_FROM) == node.name


def _is_gradient(after: ir.Node, forward: ir.Node, slopes: ir.Value) -> bool:
    """Whether a node of the same operator computes the gradient of another one, from `slopes`."""
    if not _is(after, forward.op_type):
        return False
    if forward.op_type == "Where":
        kept, zero = _branches(after, _is_filled(forward))
        same = _is_same(after.inputs[0], forward.inputs[0])
        return same and kept is slopes and number_of(zero) == 0.0
    return after.inputs[0] is slopes and after.inputs[1] is forward.inputs[1]
