"""Separates projections to queries, keys and values that are packed into one.

The packed dim holds all heads of queries, then those of keys, then those of values, so that no
shard of it has heads that belong together. The weight is separated by its rows; nothing else
changes in what is computed. onnxruntime-genai packs projections for GroupQueryAttention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxpar.ops.contrib_schemas import MICROSOFT

_PARTS = ("query", "key", "value")
_ROWS_LAST = "MatMul"
_ROWS_FIRST = "MatMulNBits"


@dataclass(frozen=True)
class _Projection:
    """A product with a constant weight, and the sum with a constant bias that may follow it.

    Attributes:
        product: The product.
        bias: The node that adds a bias to it, or None.
    """

    product: ir.Node
    bias: ir.Node | None

    @property
    def weights(self) -> dict[int, int]:
        """The operands of the product that have rows, each with the dim of its rows."""
        if self.product.op_type == _ROWS_LAST:
            return {1: 1}
        present = range(1, len(self.product.inputs))
        return {i: 0 for i in present if i != 4 and self.product.inputs[i] is not None}


def unpack_heads(model: ir.Model) -> None:
    """Separates the projections of all attention nodes with packed operands, in place.

    A node stays as it is if its packed operand comes from anything but a projection.
    """
    graph = model.graph
    for node in list(graph):
        if node.op_identifier() != (MICROSOFT, "GroupQueryAttention", ""):
            continue
        packed = len(node.inputs) > 2 and node.inputs[1] is None and node.inputs[2] is None
        found = _projection(graph, node.inputs[0]) if packed else None
        widths = _widths(node, found) if found is not None else None
        if found is None or widths is None:
            continue
        start = 0
        for index, (part, width) in enumerate(zip(_PARTS, widths, strict=True)):
            value = _part(graph, found, part, start, width, sum(widths))
            node.replace_input_with(index, value)
            start += width
        old = [found.product] if found.bias is None else [found.bias, found.product]
        held = [v for n in old for v in n.inputs if v is not None and v.is_initializer()]
        for gone in old:
            graph.remove(gone, safe=True)
        for value in held:
            name = value.name or ""
            if name in graph.initializers and not value.uses():
                del graph.initializers[name]


def _projection(graph: ir.Graph, value: ir.Value | None) -> _Projection | None:
    """The projection that computes a value; None if other nodes do, or read a part of it."""
    node = _only_producer(value)
    bias: ir.Node | None = None
    if node is not None and node.op_identifier() == ("", "Add", ""):
        bias = node
        made = [v for v in bias.inputs if v is not None and not _is_constant(v)]
        added = [v for v in bias.inputs if v is not None and _is_constant(v)]
        if len(made) != 1 or len(added) != 1 or added[0].shape is None or len(added[0].shape) != 1:
            return None
        node = _only_producer(made[0])
    if node is None or node.op_identifier() not in (
        ("", _ROWS_LAST, ""),
        (MICROSOFT, _ROWS_FIRST, ""),
    ):
        return None
    found = _Projection(node, bias)
    constant = all(_is_constant(node.inputs[i]) for i in found.weights)
    weight = node.inputs[1]
    rank = 2 if node.op_type == _ROWS_LAST else 3
    plain = weight is not None and weight.shape is not None and len(weight.shape) == rank
    return found if constant and plain else None


def _only_producer(value: ir.Value | None) -> ir.Node | None:
    """The node that computes a value; None if the value is read more than once."""
    if value is None or value.is_graph_output() or len(value.uses()) != 1:
        return None
    return value.producer()


def _is_constant(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and value.const_value is not None


def _widths(node: ir.Node, found: _Projection) -> Sequence[int] | None:
    """Numbers of rows of queries, keys and values; None if the weight does not have such rows."""
    heads = node.attributes.get_int("num_heads", 0)
    kv = node.attributes.get_int("kv_num_heads", 0)
    weight = found.product.inputs[1]
    assert weight is not None and weight.const_value is not None
    if found.product.op_type == _ROWS_LAST:
        rows = int(weight.const_value.shape.numpy()[1])
    else:
        rows = found.product.attributes.get_int("N", 0)
    size, rest = divmod(rows, max(heads + 2 * kv, 1))
    return None if rest or not size else (heads * size, kv * size, kv * size)


def _part(
    graph: ir.Graph, found: _Projection, part: str, start: int, width: int, rows: int
) -> ir.Value:
    """Emits the projection to `width` rows, from row `start` on."""
    product = found.product
    inputs = list(product.inputs)
    for index, axis in found.weights.items():
        inputs[index] = _rows(graph, inputs[index], part, start, width, rows, axis)
    attributes = dict(product.attributes)
    if product.op_type == _ROWS_FIRST:
        attributes["N"] = ir.AttrInt64("N", width)
    made = _node(product, product, inputs, attributes, part)
    graph.insert_before(product, made)
    if found.bias is None:
        return made.outputs[0]
    operands = [
        _rows(graph, v, part, start, width, rows, 0) if _is_constant(v) else made.outputs[0]
        for v in found.bias.inputs
    ]
    added = _node(found.bias, product, operands, dict(found.bias.attributes), part)
    graph.insert_before(product, added)
    return added.outputs[0]


def _node(
    like: ir.Node,
    product: ir.Node,
    inputs: Sequence[ir.Value | None],
    attributes: dict[str, ir.Attr],
    part: str,
) -> ir.Node:
    output = ir.Value(name=f"{like.outputs[0].name}.{part}", type=like.outputs[0].type)
    node = ir.Node(
        like.domain,
        like.op_type,
        inputs,
        list(attributes.values()),
        outputs=[output],
        name=f"{like.name}.{part}",
    )
    node.metadata_props.update(like.metadata_props)
    return node


def _rows(
    graph: ir.Graph,
    value: ir.Value | None,
    part: str,
    start: int,
    width: int,
    rows: int,
    axis: int,
) -> ir.Value:
    """Some rows of a constant, loaded lazily; in a flat constant, the elements of a row adjoin."""
    assert value is not None and value.const_value is not None
    tensor, name = value.const_value, f"{value.name}.{part}"
    shape = [int(n) for n in tensor.shape.numpy()]
    each = shape[axis] // rows
    shape[axis] = width * each
    place = (slice(None),) * axis + (slice(start * each, (start + width) * each),)

    def load() -> ir.TensorProtocol:
        return ir.Tensor(tensor.numpy()[place].copy(), dtype=tensor.dtype, name=name)

    part_of = ir.LazyTensor(load, tensor.dtype, ir.Shape(shape), name=name)
    made = ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(shape), const_value=part_of
    )
    graph.register_initializer(made)
    return made
